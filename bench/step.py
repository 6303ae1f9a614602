"""Measures what one forward pass costs: `python -m bench step`.

The target is the demo target inflated to 190 M parameters, in float32. The reference is the time to read its
weights once at this machine's memory bandwidth. It is measured in turn with the steps, by summing a buffer of
the weights' size. Alternatively, `--batch-invariant DTYPE` compares steps with batch-invariant and with usual
numerics, also in turn.
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.checkpoints import linear_weights, target_path
from bench.engine import CACHE_BYTES, engine_of, prompt_seconds
from bench.report import parser_of, save, table
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from workshop.advice.steps import Steps

SHAPES = ((1, 1), (1, 2), (1, 3), (1, 5), (1, 9), (8, 1), (32, 1))  # sequences, tokens per sequence
COMPARED = ((1, 1), (1, 5), (1, 9), (8, 1), (8, 5), (32, 1), (32, 5))
PROMPT_TOKENS = 512


def measure(target: Path, threads: int, repetitions: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Returns a row per shape of a step, and facts about reading the weights once."""
    engine = engine_of(str(target), threads)
    num_bytes = 4 * linear_weights(target)  # in float32
    buffer = torch.ones(num_bytes // 4)
    steps = {shape: Steps(engine, *shape) for shape in SHAPES}
    reads: list[float] = []
    taken: dict[tuple[int, int], list[float]] = {shape: [] for shape in SHAPES}
    for _ in range(repetitions):
        started = time.perf_counter()
        buffer.sum()
        reads.append(time.perf_counter() - started)
        for shape in SHAPES:
            taken[shape].append(steps[shape].take())
    read, one = statistics.median(reads[1:]), statistics.median(taken[1, 1][1:])
    rows = []
    for shape in SHAPES:
        seconds = statistics.median(taken[shape][1:])
        rows.append(
            {
                "sequences": shape[0],
                "tokens each": shape[1],
                "ms": seconds * 1e3,
                "to reading the weights": seconds / read,
                "to one token": seconds / one,
            }
        )
    facts = {"weights MB": num_bytes / 1e6, "bandwidth GB/s": num_bytes / read / 1e9, "read ms": read * 1e3}
    return rows, facts


def compare(target: Path, dtype: str, threads: int, repetitions: int) -> list[dict[str, Any]]:
    """Returns a row per shape of a step: milliseconds with both numerics, and their ratio."""
    fields = {"model": str(target), "dtype": dtype, "threads": threads, "cache_memory": CACHE_BYTES}
    usual, invariant = (
        Engine.from_settings(EngineSettings.model_validate({**fields, "batch_invariant": value}))
        for value in (False, True)
    )
    pairs: dict[str, list[tuple[float, float]]] = {}
    for shape in COMPARED:
        steps = Steps(usual, *shape), Steps(invariant, *shape)
        taken = [(steps[0].take(), steps[1].take()) for _ in range(repetitions + 1)]
        pairs[f"{shape[0]} x {shape[1]}"] = taken
        for step in steps:
            step.close()
    pairs[f"prompt of {PROMPT_TOKENS}"] = [
        (prompt_seconds(usual, prompt(number)), prompt_seconds(invariant, prompt(number)))
        for number in range(repetitions // 3 + 2)
    ]
    return [
        {
            "dtype": dtype,
            "step": name,
            "usual ms": statistics.median(before for before, _ in taken[1:]) * 1e3,
            "batch-invariant ms": statistics.median(after for _, after in taken[1:]) * 1e3,
            "ratio": statistics.median(after / before for before, after in taken[1:]),
        }
        for name, taken in pairs.items()
    ]


def prompt(number: int) -> tuple[int, ...]:
    return tuple((number * 7919 + place * 31) % 2000 + 8 for place in range(PROMPT_TOKENS))


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("step", __doc__)
    parser.add_argument("--batch-invariant", nargs="+", metavar="DTYPE", help="types that are compared")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args(arguments)
    target = target_path("190M")
    torch.set_num_threads(options.threads)
    if options.batch_invariant is None:
        rows, facts = measure(target, options.threads, options.repetitions)
        print(table(rows), table([facts]), save("step", rows, **facts), sep="\n")
        return
    rows = [
        row
        for dtype in options.batch_invariant
        for row in compare(target, dtype, options.threads, options.repetitions)
    ]
    print(table(rows), save("batch_invariant", rows), sep="\n")
