"""Checkpoints that benchmarks run on, made when first asked for under ./checkpoints and kept there."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from bench.inflate import Size, inflate, size_of
from bench.inflated_heads import inflate_eagle3, inflate_exits, inflate_medusa, inflated_input
from outrider.demo.prompts import DEMO, DRAFTERS

FOLDER = Path("checkpoints")
DRAFT = DEMO / "draft"

# The demo target at a larger cost; the names are its parameters, about.
INFLATED = {
    "60M": Size(hidden=640, layers=12, intermediate=1600, heads=20, kv_heads=10),
    "190M": Size(hidden=1024, layers=16, intermediate=2816, heads=32, kv_heads=16),
}
INFLATED_DRAFT = Size(hidden=1024, layers=12, intermediate=3008, heads=32, kv_heads=16)  # 150 M
# The shapes of Llama 3, 8 B and 1 B, and of one to see that a benchmark runs.
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
PEAKED = 4.0  # times as wide as usual is the head: a token is about as likely as in trained models


def inflated_target(name: str) -> Path:
    """The demo target inflated to a size of INFLATED, float32."""
    return _inflated("target", FOLDER / f"target-{name}", INFLATED[name])


def inflated_draft() -> Path:
    """The demo draft inflated to INFLATED_DRAFT, float32."""
    return _inflated("draft", FOLDER / "draft-150M", INFLATED_DRAFT)


def inflated_head(drafter: str, name: str) -> Path:
    """What ships for the demo target as that drafter, for it inflated to a size of INFLATED, float32."""
    path = FOLDER / f"{drafter}-{name}"
    if not path.exists():
        print(f"making {path}", flush=True)
        old = size_of(AutoConfig.from_pretrained(DEMO / "target"))
        writers: dict[str, Callable[..., None]] = {
            "eagle3": partial(inflate_eagle3, old=old),
            "medusa": inflate_medusa,
            "early_exit": partial(inflate_exits, old=old),
        }
        writers[drafter](DRAFTERS / drafter, path, new=INFLATED[name])
    return path


def inflated_input_of(layer: int, name: str) -> int:
    """Where that layer's input, counted in the demo target, is in it inflated to a size of INFLATED."""
    return inflated_input(layer, size_of(AutoConfig.from_pretrained(DEMO / "target")), INFLATED[name])


def llama(name: str, device: str) -> Path:
    """Random weights in a shape of LLAMAS, bfloat16, made on the device; no token ends a sequence."""
    path = FOLDER / f"llama-{name}"
    if not (path / "config.json").exists():
        print(f"making {path}", flush=True)
        torch.manual_seed(0)
        config = LlamaConfig(dtype="bfloat16", eos_token_id=None, **LLAMAS[name])
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.get_output_embeddings().weight.data *= PEAKED
        model.save_pretrained(path)
    return path


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
