"""Measures the engine on a GPU, in one process and without Ray: `python -m bench gpu`.

Random weights in the shapes of Llama 3, 8 B and 1 B, with 128,256 tokens of vocabulary, are made on the spot
under ./checkpoints (19 GB of disk). Each part says which path its steps took, and is saved when it is done:

- steps: one token of one sequence as a share of the bandwidth limit (weights of the linear layers read once,
  at the bandwidth measured by summing a buffer); chains of 2 to 9 tokens, a tree, batches; greedy and with
  top-p; with graphs and without; batch-invariant numerics;
- prompts: seconds to the first token, by the length of the prompt and of its chunks.

`--models tiny --device cpu` runs anywhere, to see that it runs.
"""

import random
import statistics
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bench.checkpoints import linear_weights, llama
from bench.engine import prompt_seconds
from bench.report import parser_of, save, table
from outrider.decoding.settings import Sampling
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from workshop.advice.steps import GREEDY, Steps
from workshop.memory import free_memory

PROMPT = range(10, 210)
# Sequences, and tokens of each.
SHAPES = (*product((1,), (1, 2, 3, 5, 9)), *product((8, 64), (1, 5)), (256, 1))
TREE = (8, 5)
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "no graphs": {"graphs": False},
    "batch_invariant": {"batch_invariant": True},
}
FEW_SHAPES = ((1, 1), (8, 5))  # shapes of the slower ways
SAMPLINGS = {
    "greedy": GREEDY,
    "top-p": Sampling(temperature=0.8, top_p=0.95, max_tokens=1500, ignore_eos=True),
}
CHUNKS = (512, 2048, 8192)
PARTS = ("steps", "prompts")
BUFFER_BYTES = 2**32
WARM_UPS, REPETITIONS = 2, 20
DTYPE = "bfloat16"
CACHE: int | None = None  # bytes of the cache; None: what is left


def engine(model: Path, device: str, **settings: Any) -> Engine:
    """Returns an engine with a cache that suits all parts."""
    fields = {"model": str(model), "dtype": DTYPE, "device": device, "self_check": False, **settings}
    if CACHE is not None or device == "cpu":
        fields["cache_memory"] = CACHE or 2**28
    return Engine.from_settings(EngineSettings.model_validate(fields))


def read_bandwidth(device: str) -> float:
    """Returns the bytes per second of summing a large buffer: a median."""
    size = BUFFER_BYTES if device.startswith("cuda") else BUFFER_BYTES // 16
    buffer = torch.ones(size // 4, device=device)
    taken = []
    for _ in range(9):
        started = time.perf_counter()
        float(buffer.sum())  # waits for the device
        taken.append(time.perf_counter() - started)
    return size / statistics.median(taken[1:])


def step_rows(model: Path, device: str, bandwidth: float) -> list[dict[str, Any]]:
    """Returns a row per path, shape of a step, and sampling."""
    limit = 2 * linear_weights(model) / bandwidth  # seconds in bfloat16
    rows = []
    for way, settings in WAYS.items():
        of = engine(model, device, max_sequences=256, **settings)
        shapes, samplings = (SHAPES, [*SAMPLINGS]) if way == "graphs" else (FEW_SHAPES, ["greedy"])
        for (sequences, tokens), sampling, branches in product(shapes, samplings, (False, True)):
            if branches and (sequences, tokens) != TREE:
                continue
            row = step_row(of, (sequences, tokens), limit, branches=branches, sampling=SAMPLINGS[sampling])
            drawn = {"draft": "tree" if branches else "chain", "sampling": sampling}
            rows.append({"asked": way, **drawn, **row})
        del of
        free_memory()
    return rows


def step_row(engine: Engine, shape: tuple[int, int], limit: float, **options: Any) -> dict[str, Any]:
    """Measures a step.

    Args:
        shape: sequences, and tokens of each.
        limit: seconds in which the weights are read once.
        options: of ``Steps``.
    """
    steps = Steps(engine, *shape, prompt=PROMPT, **options)
    taken, on_device, path = [], [], ""
    for _ in range(WARM_UPS + REPETITIONS):
        taken.append(steps.take())
        if engine.last_step is not None:
            path = engine.last_step.path
            on_device.append(engine.last_step.forward)
    steps.close()
    return {
        "sequences": shape[0],
        "tokens each": shape[1],
        "path": path,
        "ms": statistics.median(taken[WARM_UPS:]) * 1e3,
        "device ms": statistics.median(on_device[WARM_UPS:]) * 1e3,
        "share of the bandwidth limit": limit / statistics.median(taken[WARM_UPS:]),
    }


def prompt_rows(model: Path, device: str, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Returns a row per length of the prompt and of its chunks."""
    rows = []
    for chunk in CHUNKS:
        of = engine(model, device, prefill_chunk=chunk, graphs=False, max_sequences=16)
        for length in lengths:
            prompts = [tuple(random.Random(seed).choices(range(10, 500), k=length)) for seed in range(3)]
            taken = [prompt_seconds(of, prompt) for prompt in prompts]
            assert of.last_step is not None
            rows.append(
                {
                    "prompt": length,
                    "chunk": chunk,
                    "path": of.last_step.path,
                    "first token s": min(taken[1:]),
                    "tokens/s": length / min(taken[1:]),
                }
            )
        del of
        free_memory()
    return rows


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("gpu", __doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", choices=["8B", "1B", "tiny"], default=["8B", "1B"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--prompts", type=int, nargs="+", default=[4096, 32768], help="tokens of prompts")
    options = parser.parse_args(arguments)
    device: str = options.device
    bandwidth = read_bandwidth(device)
    print(f"{bandwidth / 1e9:.0f} GB/s", flush=True)
    found: dict[str, list[dict[str, Any]]] = {}
    for name in options.models:
        model = llama(name, device)
        free_memory()
        for part in options.parts:
            if part == "steps":
                rows = step_rows(model, device, bandwidth)
            else:
                rows = prompt_rows(model, device, options.prompts)
            rows = [{"model": name, **row} for row in rows]
            print(f"\n{name}: {part}\n{table(rows)}", flush=True)
            found[part] = found.get(part, []) + rows
            save("gpu", [], bandwidth=bandwidth, **found)  # what is done is kept if a later part fails
