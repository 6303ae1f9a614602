"""The engine on a GPU, in one process and without Ray: `python -m bench gpu`.

Makes its pair on the spot under ./checkpoints: the demo target inflated to about 8 B parameters and the demo
draft to about 1 B, bfloat16 (18 GB of disk, 45 GB of GPU memory). Then, each part alone on the device:

- steps: one token of one sequence as a share of the bandwidth limit (the weights of the linear layers read
  once, at the bandwidth measured by summing a buffer), with graphs and without; 1 to 9 tokens beside
  one; batches; batch-invariant numerics;
- speculation end to end against plain decoding, by batch, greedy;
- transformers' own `generate`, plain and assisted by the same draft, one sequence;
- a step of the draft as it is and, where bitsandbytes is installed, in 8 and 4 bit.

`--target` and `--draft` name other checkpoints; with `--device cpu` it runs anywhere, to see that it runs.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from bench.checkpoints import gpu_draft, gpu_target
from bench.engine import requests_of, row_of, run
from bench.report import save, table
from bench.step import Steps
from outrider.engine.engine import Engine
from outrider.engine.settings import EngineSettings
from outrider.engine.speculate import Request

KIND = "json"
TOKENS = (1, 2, 3, 5, 9)
BATCHES = (8, 32, 64)
BUFFER_BYTES = 2**32
REPETITIONS = 20


def engine(model: Path, device: str, **settings: Any) -> Engine:
    fields = {"model": str(model), "dtype": "bfloat16", "device": device, **settings}
    return Engine.from_settings(EngineSettings.model_validate(fields))


def read_bandwidth(device: str) -> float:
    """Bytes per second of summing a large buffer, the median of some."""
    size = BUFFER_BYTES if device.startswith("cuda") else BUFFER_BYTES // 16
    buffer = torch.ones(size // 4, device=device)
    taken = []
    for _ in range(9):
        begun = time.perf_counter()
        float(buffer.sum())  # waits for the device
        taken.append(time.perf_counter() - begun)
    return size / statistics.median(taken[1:])


def linear_bytes(checkpoint: Path) -> int:
    """Of the linear layers' weights in bfloat16: what a step of one token has to read."""
    config = AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(2 * m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))


def step_seconds(of: Engine, sequences: int, tokens: int) -> float:
    """The median of some steps; the first capture graphs."""
    steps = Steps(of, sequences, tokens)
    taken = [steps.take() for _ in range(REPETITIONS)]
    steps.close()
    return statistics.median(taken[3:])


def step_rows(target: Path, device: str, bandwidth: float) -> list[dict[str, Any]]:
    """One row per way of running and shape of a step."""
    limit = linear_bytes(target) / bandwidth
    rows = []
    ways: dict[str, dict[str, Any]] = {
        "graphs": {},
        "no graphs": {"graphs": False},
        "batch_invariant": {"batch_invariant": True},
    }
    for way, settings in ways.items():
        of = engine(target, device, **settings)
        one = step_seconds(of, 1, 1)
        shapes = [(1, tokens) for tokens in TOKENS] + [(batch, 1) for batch in BATCHES]
        for sequences, tokens in shapes:
            seconds = step_seconds(of, sequences, tokens)
            rows.append(
                {
                    "way": way,
                    "sequences": sequences,
                    "tokens each": tokens,
                    "ms": seconds * 1e3,
                    "to one token": seconds / one,
                    "share of the bandwidth limit": limit / seconds if sequences * tokens == 1 else None,
                }
            )
        del of
        free()
    return rows


def speculation_rows(
    target: Path, draft: Path, device: str, batches: Sequence[int], depths: Sequence[int], tokens: int
) -> list[dict[str, Any]]:
    """One row per batch and depth, as in bench.engine."""
    of_target, of_draft = engine(target, device), engine(draft, device)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    rows = []
    for batch in batches:
        requests = requests_of(KIND, tokenizer, batch, tokens, 0.0)
        for depth in depths:
            run(of_target, of_draft, requests, depth)  # warms up
            pairs = []
            for _ in range(2):
                plain = run(of_target, of_draft, requests, 0)
                pairs.append((plain, run(of_target, of_draft, requests, depth)))
            rows.append(row_of(KIND, batch, depth, pairs))
    return rows


@torch.inference_mode()
def generate_rows(target: Path, draft: Path, device: str, tokens: int) -> list[dict[str, Any]]:
    """transformers' `generate`, plain and assisted: tokens per second of one sequence."""
    of_target, of_draft = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device).eval()
        for path in (target, draft)
    )
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    (request,) = requests_of(KIND, tokenizer, 1, tokens, 0.0)
    rows = []
    for way, assistant in {"plain": None, "assisted": of_draft}.items():
        taken = [generate_seconds(of_target, assistant, request, tokens) for _ in range(3)]
        rows.append({"generate": way, "tokens/s": tokens / min(taken[1:])})
    return rows


def generate_seconds(model: Any, assistant: Any, request: Request, tokens: int) -> float:
    ids = torch.tensor([request.prompt], device=model.device)
    begun = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=assistant,
        do_sample=False,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=0,
    )
    return time.perf_counter() - begun


def draft_rows(draft: Path, device: str) -> list[dict[str, Any]]:
    """One row per kind of weights: a step of one token, and of five."""
    can_quantize = device == "cpu" or find_spec("bitsandbytes") is not None
    rows = []
    for weights in (None, "int8", "int4") if can_quantize else (None,):
        of = engine(draft, device, quantization=weights)
        one, five = step_seconds(of, 1, 1), step_seconds(of, 1, 5)
        rows.append({"weights": weights or "bfloat16", "one token ms": one * 1e3, "five ms": five * 1e3})
        del of
        free()
    return rows


def free() -> None:
    """Gives memory back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench gpu", description="The engine on a GPU.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--target", type=Path, help="a checkpoint; made if left out")
    parser.add_argument("--draft", type=Path, help="a checkpoint; made if left out")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--tokens", type=int, default=128, help="generated per request")
    options = parser.parse_args(arguments)
    device: str = options.device
    target, draft = options.target or gpu_target(), options.draft or gpu_draft()
    bandwidth = read_bandwidth(device)
    print(f"{bandwidth / 1e9:.0f} GB/s", flush=True)
    parts: dict[str, list[dict[str, Any]]] = {}

    def done(name: str, rows: list[dict[str, Any]]) -> None:
        parts[name] = rows
        print(f"\n{name}\n{table(rows)}", flush=True)
        save("gpu", [], bandwidth=bandwidth, **parts)  # what is done is kept if a later part fails
        free()

    done("steps", step_rows(target, device, bandwidth))
    done(
        "speculation",
        speculation_rows(target, draft, device, options.batches, options.depths, options.tokens),
    )
    done("generate", generate_rows(target, draft, device, options.tokens))
    done("draft_steps", draft_rows(draft, device))
