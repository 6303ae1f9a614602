"""Measures what one forward pass costs, and where the time goes: `python -m bench step`.

The demo target inflated to 190 M parameters, float32. Yardstick: the time to read its weights once at the
memory bandwidth of this machine, measured in turns with the steps by summing a buffer of the weights' size.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from bench.checkpoints import inflated_target
from bench.report import save, table
from outrider.engine.forward.linear import PackedLinear
from outrider.engine.kernels.cpu.product import PanelProduct
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.forward_pass import ForwardPass
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.loop.runner import ModelRunner
from outrider.engine.settings import EngineSettings
from workshop.advice.steps import Steps

TOKENS = (1, 2, 3, 5, 9)  # tokens of a sequence in a step: a committed one and drafted ones
BATCHES = (8, 32)  # sequences of one token each


class Stopwatch:
    """Adds up the seconds inside functions that it has wrapped."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments, **named)
            self.seconds += time.perf_counter() - started
            return result

        return timed


def measure(threads: int, repetitions: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Returns rows by shape of the step, and the profile of the step of one token, both in milliseconds."""
    settings = EngineSettings(
        model=str(inflated_target("190M")), dtype="float32", threads=threads, cache_memory=2**29
    )
    forward = load_forward_pass(settings)
    runner = ModelRunner(forward, group=None)
    engine = Engine(runner)
    num_bytes = weight_bytes(runner.model)
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
    profile = profile_of(forward, runner, steps[1, 1], repetitions)
    for step in steps.values():
        step.close()
    facts = {"weights MB": num_bytes / 1e6, "bandwidth GB/s": num_bytes / read / 1e9, "read ms": read * 1e3}
    return rows, {**facts, **profile}


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the linear layers' weights, which a step reads; an embedding is read by the row."""
    return sum(
        4 * module.out_features * module.in_features
        for module in model.modules()
        if isinstance(module, PackedLinear | nn.Linear)
    )


def profile_of(forward: ForwardPass, runner: ModelRunner, steps: Steps, repetitions: int) -> dict[str, float]:
    """Returns milliseconds of a step of one token in matrix products, in attention, and outside of both."""
    products, attention = Stopwatch(), Stopwatch()
    kernel, multiply = forward.kernel, PanelProduct.__call__
    assert kernel is not None
    forward.kernel = attention.wrap(kernel)  # type: ignore[assignment]  # only called
    PanelProduct.__call__ = products.wrap(multiply)  # type: ignore[method-assign]
    try:
        wall = sum(steps.take() for _ in range(repetitions)) / repetitions * 1e3
    finally:
        forward.kernel, PanelProduct.__call__ = kernel, multiply  # type: ignore[method-assign]
    last = runner.last_step
    assert last is not None
    inside = products.seconds / repetitions * 1e3, attention.seconds / repetitions * 1e3
    return {
        "step ms": wall,
        "matrix products ms": inside[0],
        "attention ms": inside[1],
        "overhead ms": wall - sum(inside),
        "of which building ms": last.build * 1e3,
        "of which sampling ms": last.sample * 1e3,
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench step", description="What one forward pass costs.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args(arguments)
    rows, facts = measure(options.threads, options.repetitions)
    print(table(rows))
    print(table([facts]))
    print(save("step", rows, profile=facts))
