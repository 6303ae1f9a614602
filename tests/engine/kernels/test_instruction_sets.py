"""What is compiled for an older processor computes the same, on this newer one."""

import os
import subprocess
import sys

import pytest
import torch

from outrider.engine.kernels.cpu.functions import INSTRUCTION_SETS, compiled

PROGRAM = """
import torch
from outrider.engine.kernels.cpu.functions import compiled
from outrider.engine.kernels.cpu.layer import CpuOperations
from outrider.engine.kernels.cpu.product import PanelProduct

assert compiled()._name.rpartition("/")[2].startswith("avx2.")
weight, rows = torch.randn(100, 300), torch.randn(9, 300)
torch.testing.assert_close(PanelProduct(weight, None)(rows), rows @ weight.t(), atol=1e-4, rtol=0)
gate, up = rows.chunk(2, -1)
gated = torch.nn.functional.silu(gate) * up
torch.testing.assert_close(CpuOperations().gated(rows), gated, atol=1e-5, rtol=1e-5)
"""


@pytest.mark.skipif(compiled() is None, reason="Outrider was installed without a C++ compiler")
def test_avx2() -> None:
    assert torch.backends.cpu.get_cpu_capability() in INSTRUCTION_SETS
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
