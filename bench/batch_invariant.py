"""Measures what batch-invariant numerics cost: `python -m bench batch_invariant`.

Steps of the demo target inflated to 190 M take turns, with these numerics and without. Ratios are medians.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from bench.checkpoints import INFLATED, inflated_target
from bench.engine import CACHE_BYTES, prompt_seconds
from bench.report import parser_of, save, table
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from workshop.advice.steps import Steps

SHAPES = ((1, 1), (1, 5), (1, 9), (8, 1), (8, 5), (32, 1), (32, 5))  # sequences, tokens of each
PROMPT_TOKENS = 512


def prompt(number: int) -> tuple[int, ...]:
    return tuple((number * 7919 + place * 31) % 2000 + 8 for place in range(PROMPT_TOKENS))


def measure(model: str, dtype: str, threads: int, repetitions: int) -> list[dict[str, Any]]:
    """Returns a row per shape of a step: milliseconds of both, and their ratio."""
    fields = {"model": model, "dtype": dtype, "threads": threads, "cache_memory": CACHE_BYTES}
    usual, apart = (
        Engine.from_settings(EngineSettings.model_validate({**fields, "batch_invariant": value}))
        for value in (False, True)
    )
    pairs: dict[str, list[tuple[float, float]]] = {}
    for sequences, tokens in SHAPES:
        steps = Steps(usual, sequences, tokens), Steps(apart, sequences, tokens)
        name = f"{sequences} x {tokens}"
        pairs[name] = [(steps[0].take(), steps[1].take()) for _ in range(repetitions + 1)]
        for step in steps:
            step.close()
    pairs[f"prompt of {PROMPT_TOKENS}"] = [
        (prompt_seconds(usual, prompt(number)), prompt_seconds(apart, prompt(number)))
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


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("batch_invariant", __doc__)
    parser.add_argument("--target", choices=INFLATED, default="190M")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    model = str(inflated_target(options.target))
    rows = [
        row for dtype in options.dtypes for row in measure(model, dtype, options.threads, options.repetitions)
    ]
    print(table(rows))
    print(save("batch_invariant", rows, target=options.target))
