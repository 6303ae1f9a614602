"""After a simulated GPU everything is as it was: tests for the CPU run in the same process."""

from typing import Any

import pytest
import torch
import transformers.utils

from tests.support.simulated_cuda.install import needs_compiler, simulated_cuda

pytestmark = needs_compiler


def test_simulated_cuda_restores_torch_at_its_end() -> None:
    names = [name for name in dir(torch.cuda) if not name.startswith("__")]
    before = {name: getattr(torch.cuda, name) for name in names}
    generator, pin_memory = torch.Generator, torch.Tensor.pin_memory
    for _ in range(2):
        with simulated_cuda() as cuda:
            assert torch.cuda.is_available()
            assert transformers.utils.is_torch_cuda_available()
            assert torch.cuda.device_count() == cuda.device_count == 2
            made = torch.ones(2, device="cuda")
        assert {name: getattr(torch.cuda, name) for name in names} == before
        assert torch.cuda.graph.default_capture_stream is None
        assert (torch.Generator, torch.Tensor.pin_memory) == (generator, pin_memory)
        assert not torch.cuda.is_available()
        assert not transformers.utils.is_torch_cuda_available()
        assert not torch.accelerator.is_available()
        assert not torch._C._only_lift_cpu_tensors()
        assert not torch.__future__.get_overwrite_module_params_on_conversion()
        with pytest.raises((RuntimeError, AssertionError)):
            torch.ones(2, device="cuda")
        with pytest.raises(RuntimeError, match="is no more"):
            made + 1
        assert "1., 1." in repr(made)


def test_simulated_cuda_is_undone_after_an_error() -> None:
    with pytest.raises(KeyError), simulated_cuda():
        raise KeyError
    assert not torch.cuda.is_available()


def test_simulated_cuda_leaves_training_on_the_cpu_alone() -> None:
    """Autograd starts a thread for each device that it finds."""

    def trained() -> Any:
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 2)
        layer(torch.ones(1, 3)).sum().backward()
        return layer.weight.grad

    with simulated_cuda():
        beside = trained()
    assert trained().eq(beside).all()
