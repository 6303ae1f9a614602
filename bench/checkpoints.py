"""Checkpoints that benchmarks run on, made when first asked for under ./checkpoints and kept there."""

from dataclasses import asdict
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.inflate import Size, inflate
from outrider.demo.prompts import DEMO

FOLDER = Path("checkpoints")
DRAFT = DEMO / "draft"

# The demo target at a larger cost; the names are its parameters, about.
INFLATED = {
    "60M": Size(hidden=640, layers=12, intermediate=1600, heads=20, kv_heads=10),
    "190M": Size(hidden=1024, layers=16, intermediate=2816, heads=32, kv_heads=16),
}
INFLATED_DRAFT = Size(hidden=1024, layers=12, intermediate=3008, heads=32, kv_heads=16)  # 150 M
# For a GPU, in bfloat16: about 8 B and 1 B.
GPU_TARGET = Size(hidden=4096, layers=36, intermediate=14336, heads=128, kv_heads=64)
GPU_DRAFT = Size(hidden=2048, layers=16, intermediate=8192, heads=64, kv_heads=32)


def inflated_target(name: str) -> Path:
    """The demo target inflated to a size of INFLATED, float32."""
    return _inflated("target", FOLDER / f"target-{name}", INFLATED[name])


def inflated_draft() -> Path:
    """The demo draft inflated to INFLATED_DRAFT, float32."""
    return _inflated("draft", FOLDER / "draft-150M", INFLATED_DRAFT)


def gpu_target() -> Path:
    """The demo target inflated to GPU_TARGET, bfloat16."""
    return _inflated("target", FOLDER / "target-8B", GPU_TARGET, torch.bfloat16)


def gpu_draft() -> Path:
    """The demo draft inflated to GPU_DRAFT, bfloat16."""
    return _inflated("draft", FOLDER / "draft-1B", GPU_DRAFT, torch.bfloat16)


def _inflated(role: str, path: Path, size: Size, dtype: torch.dtype = torch.float32) -> Path:
    if not (path / "config.json").exists():
        print(f"making {path}", flush=True)
        inflate(DEMO / role, path, dtype, **asdict(size))
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
