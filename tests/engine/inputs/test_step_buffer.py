"""Fields of a step keep their values, shapes and dtypes in the one buffer that is copied."""

import numpy as np
import torch

from outrider.engine.choosing.step_result import StepResult
from outrider.engine.inputs.step_buffer import ALIGNMENT, Field, StepBuffer, buffer_size, split

CPU = torch.device("cpu")
FIELDS = {"ids": Field((1, 3)), "none": Field((0, 3)), "scales": Field((3,), "float64"), "last": Field((1,))}


def test_step_buffer_copied_to_larger_memory_gives_each_field_back() -> None:
    buffer = StepBuffer(FIELDS, CPU)
    buffer.arrays["ids"][:] = [[1, 2, 3]]
    buffer.arrays["scales"][:] = [0.5, -np.inf, 2.0]
    buffer.arrays["last"][:] = 7
    memory = torch.zeros(buffer.size + 64, dtype=torch.uint8)
    buffer.send_to(memory)
    for found in (buffer.sent(), buffer.at(memory)):
        assert found["ids"].tolist() == [[1, 2, 3]]
        assert found["none"].shape == (0, 3)
        assert found["scales"].tolist() == [0.5, -np.inf, 2.0]
        assert (found["scales"].dtype, found["last"].tolist()) == (torch.float64, [7])
    assert not memory[buffer.size :].any()


def test_step_buffer_aligns_each_field() -> None:
    """Kernels compile anew for a pointer with another alignment."""
    memory = torch.zeros(buffer_size(FIELDS), dtype=torch.uint8)
    for view in split(FIELDS, memory).values():
        assert (view.storage_offset() * view.itemsize) % ALIGNMENT == 0


def test_step_result_packed_gives_each_field_back() -> None:
    result = StepResult(
        torch.tensor([[5, 6], [7, 8], [9, 1]], dtype=torch.int32),
        torch.tensor([[0.5, -torch.inf], [1.0, 2.0], [3.0, 4.0]]),
        torch.tensor([-3, 4, 5], dtype=torch.int32),
        torch.tensor([6], dtype=torch.int32),
        torch.tensor([True, False, True]),
        torch.zeros(0, dtype=torch.bool),
        torch.tensor([False, True, True, True, False]),
    )
    arrived = result.unpacked(result.packed())
    for name, sent in vars(result).items():
        field = getattr(arrived, name)
        assert field.tolist() == sent.tolist(), name
        assert torch.from_numpy(field.copy()).dtype == sent.dtype, name
