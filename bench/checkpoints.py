"""Checkpoints that benchmarks run on, made when first asked for under ./checkpoints and kept there."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from outrider.demo.inflation import Size, inflate
from outrider.demo.prompts import DEMO

FOLDER = Path("checkpoints")
DRAFT = DEMO / "draft"

# The demo target at a larger cost; the names are its parameters, about.
INFLATED = {
    "60M": Size(hidden=640, layers=12, intermediate=1600, heads=20, kv_heads=10),
    "190M": Size(hidden=1024, layers=16, intermediate=2816, heads=32, kv_heads=16),
}
# Shapes of Llama 3, 8 B and 1 B, and of a tiny model, which shows that a benchmark runs.
LLAMAS: dict[str, dict[str, Any]] = {
    "8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 65536,
    },
    "1B": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 65536,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
    },
}
EMBEDDED = 30.0  # standard deviation of embeddings that decide what comes next
PEAKED = 4.0  # times as wide as usual is the head: a token is about as likely as in trained models


def inflated_target(name: str) -> Path:
    """The demo target inflated to a size of INFLATED, float32."""
    return _inflated("target", FOLDER / f"target-{name}", INFLATED[name])


def llama(name: str, device: str) -> Path:
    """Random weights in a shape of LLAMAS, bfloat16, made on the device; no token ends a sequence."""
    path = FOLDER / f"llama-{name}"
    if not (path / "config.json").exists():
        print(f"making {path}", flush=True)
        model = _random(name, device)
        model.get_output_embeddings().weight.data *= PEAKED
        model.save_pretrained(path)
    return path


def known_llama(name: str, path: Path, device: str, follows: Callable[[int], np.ndarray]) -> int:
    """Writes a model whose text is known, in a shape of LLAMAS; returns the size of its vocabulary.

    Args:
        follows: gives, for a size of the vocabulary, the token that is said after each token.
    """
    model = _random(name, device, tie_word_embeddings=False)
    vocab_size: int = model.config.vocab_size
    say_after(model, torch.from_numpy(follows(vocab_size)).to(device))
    model.save_pretrained(path)
    return vocab_size


@torch.inference_mode()
def say_after(model: Any, follows: torch.Tensor) -> None:
    """Has a model of random weights say ``follows[token]`` after a token, by far more likely than any other.

    Else its text would hang on the rounding of a step, which is another one with Drafts than without, and no
    drafter could know it for long. A model with tied embeddings can only say the same token again.
    """
    embeddings = model.get_input_embeddings().weight
    embeddings.mul_(EMBEDDED / embeddings.std())
    head = model.get_output_embeddings().weight
    if head is not embeddings:
        head[follows] = embeddings / EMBEDDED


def _random(name: str, device: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(dtype="bfloat16", eos_token_id=None, **{**LLAMAS[name], **fields})
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _inflated(role: str, path: Path, size: Size) -> Path:
    if not (path / "config.json").exists():
        print(f"making {path}", flush=True)
        inflate(DEMO / role, path, torch.float32, **asdict(size))
    return path


def random_llama() -> Path:
    """A Llama of 32 M random weights, float32, that never ends a sequence: for plain decoding alone."""
    path = FOLDER / "random-32M"
    if not (path / "config.json").exists():
        print(f"making {path}", flush=True)
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=512,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            intermediate_size=1408,
            vocab_size=8192,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            eos_token_id=None,
        )
        model = LlamaForCausalLM(config)
        for weight in model.parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=0.04)
        model.save_pretrained(path)
    return path
