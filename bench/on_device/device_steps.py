"""Step times of an engine on a device, relative to the time of reading its weights once."""

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from workshop.advice.steps import Steps

PROMPT = range(10, 210)
BUFFER_BYTES = 2**32
WARM_UPS, REPETITIONS = 2, 20
DTYPE = "bfloat16"
CACHE: int | None = None  # bytes of the cache; None: all free memory


def engine(model: Path, device: str, **settings: Any) -> Engine:
    """Returns an engine with a cache large enough for all parts."""
    fields = {"model": str(model), "dtype": DTYPE, "device": device, "self_check": False, **settings}
    if CACHE is not None or device == "cpu":
        fields["cache_memory"] = CACHE or 2**28
    return Engine.from_settings(EngineSettings.model_validate(fields))


def read_bandwidth(device: str) -> float:
    """Returns the memory bandwidth in bytes per second: the median of sums over a large buffer."""
    size = BUFFER_BYTES if device.startswith("cuda") else BUFFER_BYTES // 16
    buffer = torch.ones(size // 4, device=device)
    taken = []
    for _ in range(9):
        started = time.perf_counter()
        float(buffer.sum())  # waits for the device
        taken.append(time.perf_counter() - started)
    return size / statistics.median(taken[1:])


def step_row(engine: Engine, shape: tuple[int, int], limit: float) -> dict[str, Any]:
    """Measures a step.

    Args:
        shape: number of sequences, and tokens per sequence.
        limit: seconds to read the weights once.
    """
    steps = Steps(engine, *shape, prompt=PROMPT)
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
