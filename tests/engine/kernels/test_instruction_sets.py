"""What is compiled for an older processor computes the same, on this newer one, which can stand for it."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outrider.engine.kernels.cpu.functions import INSTRUCTION_SETS, found
from tests.support.functions import needs_functions

PROGRAM = """
import torch
from outrider.engine.kernels.cpu.functions import compiled
from outrider.engine.forward.cpu_operations import CpuOperations
from outrider.engine.kernels.cpu.product import PanelProduct

assert compiled()._name.rpartition("/")[2].startswith("avx2.")
weight, rows = torch.randn(100, 300), torch.randn(9, 300)
torch.testing.assert_close(PanelProduct(weight, None)(rows), rows @ weight.t(), atol=1e-4, rtol=0)
gate, up = rows.chunk(2, -1)
gated = torch.nn.functional.silu(gate) * up
torch.testing.assert_close(CpuOperations().gated(rows), gated, atol=1e-5, rtol=1e-5)
"""


@needs_functions
def test_avx2() -> None:
    assert torch.backends.cpu.get_cpu_capability() in INSTRUCTION_SETS
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)


@needs_functions
def test_library_older_than_its_source_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda path: SimpleNamespace())
    missing = found.__wrapped__()
    assert isinstance(missing, str)
    assert "is older than functions.cpp; an installation compiles it again" in missing


SWITCHED_OFF = """
import sys
import torch
from outrider.engine.forward.linear import why_unpacked
from outrider.engine.kernels.cpu.functions import compiled
from outrider.engine.loading.int8_product import right_kind
from tests.support.functions import needs_functions

library = compiled()
name = "" if library is None else library._name.rpartition("/")[2].partition(".")[0]
assert name in sys.argv[1:], name
assert why_unpacked(torch.bfloat16, 256, 192) is not None
assert right_kind(256, 192) != "whole"
"""


@pytest.mark.slow
@pytest.mark.parametrize(("variable", "compiled_for"), [("AS_AVX2", "avx2"), ("AS_OLDER", "")])
def test_environment_of_an_older_processor_switches_fast_ways_off(variable: str, compiled_for: str) -> None:
    """Whether functions are compiled at all is the installation's part."""
    makefile = (Path(__file__).parents[3] / "Makefile").read_text()
    (line,) = re.findall(rf"^{variable} := (.*)$", makefile, re.M)
    environment = {**os.environ, **dict(setting.split("=") for setting in line.split())}
    command = [sys.executable, "-c", SWITCHED_OFF, "", compiled_for]
    subprocess.run(command, env=environment, check=True)
