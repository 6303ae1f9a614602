"""Loads an engine that compiles its Triton kernels for an absent GPU, and prints where the kernels are kept.

Run as ``python -m tests.support.ahead_of_time CHECKPOINT`` with TRITON_INTERPRET=0. The engine, its launches
and Triton's cache are real, but launches compute nothing, so the engine's numbers are meaningless.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from tests.support.simulated_cuda.install import simulated_cuda

HOPPER = GPUTarget("cuda", 90, 32)


class AbsentGpu:
    """Stub of Triton's driver of a GPU."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_only() -> Iterator[None]:
    """Context in which launches only compile their kernels."""
    launch = JITFunction.run

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(function, *args, grid=grid, warmup=True, **kwargs)

    driver.set_active(AbsentGpu())  # type: ignore[arg-type]
    with patch.object(JITFunction, "run", compile_only):
        yield


def kept() -> dict[str, Any]:
    """Returns the folder of Triton's cache, and the names of its kernels that are compiled for the GPU."""
    folder = Path(knobs.cache.dir)
    return {"folder": str(folder), "kernels": sorted({file.stem for file in folder.glob("*/*.cubin")})}


if __name__ == "__main__":
    with simulated_cuda(1), compiling_only():
        Engine.from_settings(
            EngineSettings(
                model=sys.argv[1],
                device="cuda",
                dtype="bfloat16",
                cache_memory=2**24,
                self_check=False,
                graphs=False,
            )
        )
        print(json.dumps(kept()))  # the simulated device restores the environment
