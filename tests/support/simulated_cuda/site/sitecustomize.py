"""Gives every process that loads a model simulated GPUs. Python runs this file at its start.

The folder is on PYTHONPATH of a service, see in_service.py. The service's own code is unchanged.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

HOLDS_A_MODEL = "outrider.engine.loop.load"


class _Watch(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != HOLDS_A_MODEL:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_simulate(module: ModuleType) -> None:
            from tests.support.simulated_cuda.in_service import simulate

            execute(module)
            simulate(module)

        spec.loader.exec_module = execute_and_simulate  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Watch())
