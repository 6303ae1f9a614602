"""Checkpoints for benchmarks, created on first use under ./checkpoints and kept there."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from outrider.demo.inflation import Size, inflate
from outrider.demo.prompts import DEMO

FOLDER = Path("checkpoints")
DRAFT = DEMO / "draft"
DEMO_PAIR = "demo"

# Larger sizes of the demo target, named by their approximate number of parameters.
INFLATED = {
    "60M": Size(hidden=640, layers=12, intermediate=1600, heads=20, kv_heads=10),
    "190M": Size(hidden=1024, layers=16, intermediate=2816, heads=32, kv_heads=16),
}


def llama_fields(size: Size, **others: Any) -> dict[str, Any]:
    """Returns fields of a Llama's configuration; ``others`` replace the values of Llama 3."""
    return {
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "intermediate_size": size.intermediate,
        "vocab_size": 128256,
        "max_position_embeddings": 65536,
        **others,
    }


# Shapes of Llama 3, 8 B and 1 B, and of a tiny model to try a benchmark.
SMALL = Size(hidden=2048, layers=16, intermediate=8192, heads=32, kv_heads=8)
TINY = Size(hidden=64, layers=2, intermediate=128, heads=4, kv_heads=2)
LLAMAS = {
    "8B": llama_fields(Size(hidden=4096, layers=32, intermediate=14336, heads=32, kv_heads=8)),
    "1B": llama_fields(SMALL, tie_word_embeddings=True),
    "tiny": llama_fields(TINY, vocab_size=512, max_position_embeddings=1024),
}
# Sizes of a layer of Qwen3-30B-A3B. A token chooses 8 of its 128 experts.
MIXTURE: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
}
# Dense layer as wide as the experts that a token of the mixture chooses.
DENSE_TWIN: dict[str, Any] = {
    "hidden_size": MIXTURE["hidden_size"],
    "num_attention_heads": MIXTURE["num_attention_heads"],
    "num_key_value_heads": MIXTURE["num_key_value_heads"],
    "head_dim": MIXTURE["head_dim"],
    "intermediate_size": MIXTURE["num_experts_per_tok"] * MIXTURE["moe_intermediate_size"],
    "vocab_size": MIXTURE["vocab_size"],
}
EMBEDDED = 30.0  # standard deviation of the embeddings, so large that they alone decide the next token


def target_path(name: str) -> Path:
    """Returns the path of the demo target, or of a target inflated to a size of INFLATED, which it makes.

    The path is absolute, because services that benchmarks start run in folders of their own. Inflated targets
    are in float32.
    """
    if name == DEMO_PAIR:
        return (DEMO / "target").absolute()
    path = FOLDER.absolute() / f"target-{name}"
    if not (path / "config.json").exists():
        print(f"making {path}", flush=True)
        inflate(DEMO / "target", path, torch.float32, **asdict(INFLATED[name]))
    return path


def linear_weights(checkpoint: Path) -> int:
    """Returns the number of weights of the linear layers, which a step of one token must read."""
    config = AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


def known_llama(name: str, path: Path, device: str, follows: Callable[[int], np.ndarray]) -> int:
    """Writes a model with known text, in a shape of LLAMAS, and returns its vocabulary size.

    Args:
        follows: returns, for a vocabulary size, the next token after each token.
    """
    torch.manual_seed(0)
    fields = {**LLAMAS[name], "tie_word_embeddings": False}
    config = LlamaConfig(dtype="bfloat16", eos_token_id=None, **fields)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    vocab_size: int = model.config.vocab_size
    say_after(model, torch.from_numpy(follows(vocab_size)).to(device))
    model.save_pretrained(path)
    return vocab_size


@torch.inference_mode()
def say_after(model: Any, follows: torch.Tensor) -> None:
    """Changes random weights so that ``follows[token]`` is by far the most likely next token.

    Otherwise the text would depend on the rounding of a step, which differs with Drafts and without. No
    drafter could predict it for long. A model with tied embeddings can only repeat the token.
    """
    embeddings = model.get_input_embeddings().weight
    embeddings.mul_(EMBEDDED / embeddings.std())
    head = model.get_output_embeddings().weight
    if head is not embeddings:
        head[follows] = embeddings / EMBEDDED
