"""Simulates declared GPUs of a node, as torch and the driver would show them to its processes.

Python imports this file if its folder is on PYTHONPATH. While a process determines its place
(actors/place.py), it sees the GPUs of DECLARED_GPUS that CUDA_VISIBLE_DEVICES allows. Everything else runs on
the CPU.

DECLARED_GPUS: name of a node and accelerator types of its GPUs: ``a:H100,H100``.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from inspect import unwrap
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

DECLARED = "DECLARED_GPUS"
BYTES = {"H100": 80 * 10**9, "L4": 24 * 10**9}


def declared() -> list[str]:
    """Returns the name of each GPU of this node: type, node and index."""
    node, _, types = os.environ.get(DECLARED, "").partition(":")
    return [f"{kind} {node}{index}" for index, kind in enumerate(types.split(",")) if kind]


def visible() -> list[str]:
    """Returns the names of the GPUs that CUDA would show: all before the first id that does not exist."""
    there = declared()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return there
    by_id = {f"GPU-{name.split()[1]}": name for name in there}
    by_id |= {str(index): name for index, name in enumerate(there)}
    found: list[str] = []
    for gpu in chosen.split(","):
        if gpu not in by_id:
            break
        found.append(by_id[gpu])
    return found


def tells(place_of: Any) -> Any:
    """Wraps a function so that torch shows the declared GPUs while it runs."""

    @wraps(place_of)
    def telling(*arguments: Any) -> Any:
        import torch

        from outrider.engine.loading import weights

        def properties(_: object) -> SimpleNamespace:
            return SimpleNamespace(total_memory=BYTES[visible()[0].split()[0]])

        with ExitStack() as undo:
            for name, value in {
                "device_count": lambda: len(visible()),
                "is_available": lambda: bool(visible()),
                "get_device_name": lambda index: visible()[index],
                "get_device_properties": properties,
            }.items():
                undo.enter_context(patch.object(torch.cuda, name, value))
            undo.enter_context(patch.object(weights, "resolve_device", unwrap(weights.resolve_device)))
            return place_of(*arguments)

    return telling


def computes_on_the_cpu(resolve_device: Any) -> Any:
    """Wraps a function so that it resolves every device to the CPU."""

    @wraps(resolve_device)
    def resolved(name: str) -> Any:
        return resolve_device("cpu")

    return resolved


CHANGES = {
    "actors.place": ("place_of", tells),
    "outrider.engine.loading.weights": ("resolve_device", computes_on_the_cpu),
}


class Changing(MetaPathFinder, Loader):
    """Patches a function of a module after loading the module, before others import the function."""

    def __init__(self) -> None:
        self._loading: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in CHANGES or fullname in self._loading:
            return None
        self._loading.add(fullname)
        spec = find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            name, change = CHANGES[fullname]
            setattr(module, name, change(getattr(module, name)))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if DECLARED in os.environ:
    sys.meta_path.insert(0, Changing())
