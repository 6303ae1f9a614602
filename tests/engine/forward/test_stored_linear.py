"""Layers with stored weights on a simulated GPU: text, launches, and that a wrong kernel is noticed."""

from pathlib import Path

import pytest
import torch

from outrider.decoding.settings import Sampling
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.kernels import stored_weight
from outrider.engine.loop.engine import Engine
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.planning.step_costs import KERNELS_OF_PASS
from tests.support.checkpoints import write_checkpoint
from tests.support.launching import settings_of, text
from tests.support.quantized_checkpoints import quantize
from tests.support.simulated_cuda.install import needs_compiler, simulated_cuda
from tests.support.simulated_cuda.steps import counts_of_step

pytestmark = needs_compiler
stored_product = pytest.importorskip(
    "outrider.engine.kernels.stored_product", reason="needs triton: pip install triton"
)


def checkpoints(folder: Path, name: str) -> tuple[Path, Path]:
    """A checkpoint in this format, and the weights that it stands for."""
    return quantize(write_checkpoint(folder / "plain", "llama", num_hidden_layers=1), name, folder)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("name", ["fp8", "compressed int8", "compressed int4, zeros", "modelopt nvfp4"])
def test_text_on_a_gpu_is_that_of_the_weights_numbers(tmp_path: Path, name: str) -> None:
    quantized, meant = quantize(
        write_checkpoint(tmp_path / "plain", "llama", num_hidden_layers=1), name, tmp_path
    )
    with simulated_cuda():
        found = text(settings_of(quantized, device="cuda"))
    assert found == text(settings_of(meant, device="cpu"))


def test_layers_launch_as_many_kernels_as_if_they_were_not_quantized(tmp_path: Path) -> None:
    quantized, meant = quantize(
        write_checkpoint(tmp_path / "plain", "llama", num_hidden_layers=1), "fp8", tmp_path
    )
    sampling = Sampling(temperature=0.0, max_tokens=64)
    with simulated_cuda():
        for folder in (quantized, meant):
            settings = settings_of(folder, device="cuda", dtype="float16", self_check=False)
            counts = counts_of_step(Engine.from_settings(settings), 1, 1, sampling)
            planned = skeleton(settings).layer_kernels() + KERNELS_OF_PASS
            assert counts.launches.total() == planned, counts.report()


def test_wrong_kernel_is_refused_by_the_self_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, _ = quantize(
        write_checkpoint(tmp_path / "plain", "llama", num_hidden_layers=1), "fp8", tmp_path
    )
    right = stored_product.multiply

    def multiply(
        rows: torch.Tensor, weight: stored_weight.StoredWeight, *others: torch.Tensor | None
    ) -> torch.Tensor:
        return right(rows, weight, *others) * 1.1

    monkeypatch.setattr(stored_product, "multiply", multiply)
    with simulated_cuda(), pytest.raises(UnsupportedModelError, match="does not compute what it computes"):
        Engine.from_settings(settings_of(quantized, device="cuda"))
