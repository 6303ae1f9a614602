"""The linear layers of the 190 M target alone, packed and as nn.Linear: `python -m bench linear`.

Yardstick: the time to read their weights once, measured in turns with them.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bench.report import save, table
from outrider.engine.forward.linear import PackedLinear

LAYERS = 16
SHAPES = ((2048, 1024), (1024, 1024), (5632, 1024), (1024, 2816))  # (out, in): q k v, o, gate up, down
ROWS = (1, 2, 3, 5, 9, 32)
BUFFER_BYTES = 760 * 2**20  # the weights of that target in float32: no cache of a usual machine holds them


def seconds(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def read_bandwidth(threads: int) -> float:
    """Bytes per second at which `threads` threads read memory: the median over sums of a large buffer."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        buffer = torch.ones(BUFFER_BYTES // 4)
        buffer.sum()
        return BUFFER_BYTES / statistics.median(seconds(buffer.sum) for _ in range(9))
    finally:
        torch.set_num_threads(before)


def all_layers(layers: list[nn.Module], inputs: dict[int, Tensor]) -> Callable[[], None]:
    def run() -> None:
        for layer in layers:
            layer(inputs[layer.in_features])  # type: ignore[index]

    return run


@torch.inference_mode()
def measure(dtype: torch.dtype, repetitions: int) -> list[dict[str, Any]]:
    """One row per number of rows: milliseconds of all layers, and the packed ones' ratio to the yardstick."""
    plain = [nn.Linear(inside, out, bias=False, dtype=dtype) for _ in range(LAYERS) for out, inside in SHAPES]
    packed = [PackedLinear(layer.weight, None) for layer in plain]
    buffer = torch.ones(sum(layer.weight.nbytes for layer in plain) // 4)
    results = []
    for rows in ROWS:
        inputs = {width: torch.randn(rows, width, dtype=dtype) for _, width in SHAPES}
        candidates: dict[str, Callable[[], object]] = {
            "read": buffer.sum,
            "nn.Linear": all_layers([*plain], inputs),
            "packed": all_layers([*packed], inputs),
        }
        taken: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(repetitions + 1):
            for name, function in candidates.items():
                taken[name].append(seconds(function))
        median = {name: statistics.median(times[1:]) for name, times in taken.items()}  # the first warms up
        results.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "rows": rows,
                **{f"{name} ms": value * 1e3 for name, value in median.items()},
                "nn.Linear to read": median["nn.Linear"] / median["read"],
                "packed to read": median["packed"] / median["read"],
            }
        )
    return results


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench linear", description="The linear layers alone.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=11)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    bandwidth = read_bandwidth(options.threads)
    rows = [*measure(torch.float32, options.repetitions), *measure(torch.bfloat16, options.repetitions)]
    print(f"{bandwidth / 1e9:.1f} GB/s read by {options.threads} threads")
    print(table(rows))
    print(save("linear", rows, bandwidth=bandwidth))
