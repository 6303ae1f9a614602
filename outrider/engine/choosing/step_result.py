"""Result of a step's choice of tokens: named fields that reach the host in one copy."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.inputs.step_buffer import Field, split

Array = TypeVar("Array")

_NAMES = {torch.int32: "int32", torch.float32: "float32", torch.bool: "bool"}


@dataclass(frozen=True)
class StepResult(Generic[Array]):
    """Fields in the order of their bytes: numbers of four bytes come before flags."""

    top_tokens: Array  # int32 [num_rows, ranks] best tokens under the keyed noise, best first
    perturbed: Array  # float32 [num_rows, ranks] their perturbed logits, -inf for banned tokens
    logprobs: Array  # int32 [numbers] result of LogprobRequest.found
    experts_read: Array  # int32 [1] experts that the pass read in all layers together; [0]: not counted
    are_valid: Array  # bool [num_rows] false: a number is not finite, so no token may come from the row
    are_accepted: Array  # bool [num_rows] accepted by coupled verification; [0]: the host has to find it
    are_finite: Array  # bool [num_tokens] whether all cached numbers of a fed token are finite

    def on_host(self: "StepResult[Tensor]") -> "StepResult[NDArray[Any]]":
        """Returns the fields of a result that is in the host's memory, without a copy."""
        return StepResult(*(tensor.numpy() for tensor in vars(self).values()))

    def packed(self: "StepResult[Tensor]") -> Tensor:
        """Returns all fields concatenated, uint8 [num_bytes], with one kernel launch."""
        tensors = [tensor for tensor in vars(self).values() if tensor.numel()]
        return torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])

    def unpacked(self: "StepResult[Tensor]", arrived: Tensor) -> "StepResult[NDArray[Any]]":
        """Returns the fields on the host. arrived: copy of the result of ``packed``."""
        fields = {
            name: Field(tuple(tensor.shape), _NAMES[tensor.dtype]) for name, tensor in vars(self).items()
        }
        return StepResult(**split(fields, arrived.numpy(), alignment=1))
