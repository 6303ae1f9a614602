"""Simulated GPUs for the processes of a service: an engine or a rank has the GPUs that Ray assigned."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider.engine.forward.graphs
from tests.support.simulated_cuda.guard import load_guard
from tests.support.simulated_cuda.install import simulated_cuda

ROOT = Path(__file__).parents[3]
SITE = Path(__file__).with_name("site")
GPUS = "SIMULATED_GPUS"  # variable: number of the machine's GPUs
NOTES = "SIMULATED_GPUS_NOTES"  # variable: folder of notes about loaded models, a file for each process
FOREVER = ExitStack()  # keeps contexts from being closed
GRAPH_ROWS = (1, 4, 8)  # few and small, because a graph of many rows takes seconds in Triton's interpreter


@contextmanager
def machine_with_gpus(count: int, notes: Path) -> Iterator[None]:
    """Context in which new processes that load a model have simulated GPUs."""
    load_guard()  # so that the processes need not compile it concurrently
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (SITE, ROOT))))
        patch.setenv(GPUS, str(count))
        patch.setenv(NOTES, str(notes))
        yield


def simulate(loop_load: Any) -> None:
    """Simulates GPUs in this process for its lifetime. Called by site/sitecustomize.py.

    loop_load: module outrider.engine.loop.load, which was just imported.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = int(os.environ[GPUS]) if visible is None else len([*filter(None, visible.split(","))])
    if not count:
        return
    FOREVER.enter_context(simulated_cuda(count))
    outrider.engine.forward.graphs.CAPTURED_SIZES = GRAPH_ROWS
    load = loop_load.load_forward_pass

    def load_and_note(*given: Any) -> Any:
        forward = load(*given)
        told = {
            "visible": visible,
            "device": str(forward.device),
            "rank": None if forward.group is None else forward.group.rank,
            "fraction": torch.cuda.get_per_process_memory_fraction(forward.device),
            "allocated": torch.cuda.memory_allocated(forward.device),
        }
        (Path(os.environ[NOTES]) / str(os.getpid())).write_text(json.dumps(told))
        return forward

    loop_load.load_forward_pass = load_and_note
