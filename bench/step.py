"""Measures what one forward pass costs: `python -m bench step`.

The demo target inflated to 190 M parameters, float32. Yardstick: the time to read its weights once at the
memory bandwidth of this machine, measured in turns with the steps by summing a buffer of the weights' size.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from bench.checkpoints import inflated_target, linear_weights
from bench.engine import engine_of
from bench.report import parser_of, save, table
from workshop.advice.steps import Steps

TOKENS = (1, 2, 3, 5, 9)  # tokens of a sequence in a step: a committed token and drafted tokens
BATCHES = (8, 32)  # sequences of one token each


def measure(threads: int, repetitions: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Returns rows by shape of the step, and what reading the weights once takes."""
    target = inflated_target("190M")
    engine = engine_of(str(target), threads)
    num_bytes = 4 * linear_weights(target)  # in float32
    buffer = torch.ones(num_bytes // 4)
    shapes = [(1, tokens) for tokens in TOKENS] + [(batch, 1) for batch in BATCHES]
    steps = {shape: Steps(engine, *shape) for shape in shapes}
    reads: list[float] = []
    taken: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    for _ in range(repetitions):
        started = time.perf_counter()
        buffer.sum()
        reads.append(time.perf_counter() - started)
        for shape in shapes:
            taken[shape].append(steps[shape].take())
    read = statistics.median(reads[1:])
    one = statistics.median(taken[1, 1][1:])
    rows = []
    for shape in shapes:
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
    for step in steps.values():
        step.close()
    facts = {"weights MB": num_bytes / 1e6, "bandwidth GB/s": num_bytes / read / 1e9, "read ms": read * 1e3}
    return rows, facts


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("step", __doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args(arguments)
    rows, facts = measure(options.threads, options.repetitions)
    print(table(rows))
    print(table([facts]))
    print(save("step", rows, **facts))
