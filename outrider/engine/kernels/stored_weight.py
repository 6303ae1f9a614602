"""Quantized weight of a linear layer as its checkpoint stores it: codes, scales and zero points.

A number of the weight is (value of its code - zero of its group) * scale of its group * factor of its output.
A group is some neighbouring inputs of an output. The kinds of codes:

    e4m3    8 bit floats with 4 bits of exponent: FP8
    int8    8 bit integers
    int4    4 bit integers, stored with an offset of 8
    e2m1    4 bit floats with 2 bits of exponent: the codes of MXFP4 and NVFP4

Two codes of 4 bits share a byte. A kernel reads a span of bytes at a time. The low halves of these bytes hold
the codes of a span of inputs, the high halves hold the codes of the next span.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["e4m3", "int8", "int4", "e2m1"]
BITS: dict[Kind, int] = {"e4m3": 8, "int8": 8, "int4": 4, "e2m1": 4}
MIDDLE_INT4 = 8  # code of the integer 0
# Bounds of a span: most bytes of an output that a kernel reads at a time, fewest inputs for tensor cores.
LONGEST_SPAN, LEAST_SPAN = 128, 16


@dataclass(frozen=True)
class StoredWeight:
    """Quantized weight [outputs, inputs], made by ``of``."""

    kind: Kind
    span: int  # inputs whose codes lie in neighbouring bytes
    codes: Tensor  # uint8 [outputs, bytes]
    scales: Tensor | None  # floating point [outputs, groups]; None: 1
    zeros: Tensor | None  # int16 [outputs, groups], with scales only; None: 0
    factors: Tensor | None  # float32 [outputs]; None: 1

    @staticmethod
    def of(
        kind: Kind,
        codes: Tensor,
        scales: Tensor | None = None,
        zeros: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> "StoredWeight":
        """Packs a weight.

        Args:
            codes: one-byte type [outputs, inputs], a code per byte.
            scales, zeros, factors: values of the fields. The groups divide the inputs evenly.

        Raises:
            ValueError: the groups do not divide the inputs, or the number of 4 bit codes is odd.
        """
        outputs, inputs = codes.shape
        groups = 1 if scales is None else scales.shape[1]
        shared = 8 // BITS[kind]
        if inputs % groups or inputs % shared:
            raise ValueError(f"{inputs} inputs in {groups} groups, {shared} in a byte")
        span = gcd(LONGEST_SPAN, inputs // groups, inputs // shared)
        codes = codes.view(torch.uint8)
        if shared == 2:
            low, high = codes.view(outputs, -1, 2, span).unbind(2)
            codes = (low | high << 4).view(outputs, -1)
        return StoredWeight(kind, span, codes.contiguous(), scales, zeros, factors)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, num_bytes = self.codes.shape
        return outputs, num_bytes * 8 // BITS[self.kind]

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.shape[1] // (1 if self.scales is None else self.scales.shape[1])

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, *self._parts) if part is not None)

    @property
    def layout(self) -> tuple[object, ...]:
        """Description that is equal for weights of the same input that can be joined."""
        parts = (None if part is None else (part.dtype, part.shape[1:]) for part in self._parts)
        return self.kind, self.span, self.shape[1], *parts

    @property
    def _parts(self) -> tuple[Tensor | None, ...]:
        return self.scales, self.zeros, self.factors

    def values(self) -> Tensor:
        """Returns the values of the codes, float32 [outputs, inputs]."""
        codes = self._unpacked()
        if self.kind == "int8":
            return codes.view(torch.int8).float()
        if self.kind == "int4":
            return codes.float().sub_(MIDDLE_INT4)
        # Reinterpreted as float32, the bits are the value over a power of 2. torch's conversion of FP8 takes
        # thirty times as long.
        signed = (codes if self.kind == "e4m3" else codes << 4).view(torch.int8).int()
        shift, copies_of_sign, power = (20, 15 << 27, 120) if self.kind == "e4m3" else (18, 63 << 25, 126)
        bits = signed.bitwise_left_shift_(shift).bitwise_and_(~copies_of_sign)
        return bits.view(torch.float32).mul_(2.0**power)

    def widened(self) -> Tensor:
        """Returns the numbers of the weight, float32 [outputs, inputs]."""
        numbers = self.values()
        if self.scales is not None:
            grouped = numbers.view(*self.scales.shape, -1)
            if self.zeros is not None:
                grouped.sub_(self.zeros[..., None])
            grouped.mul_(self.scales[..., None])
        return numbers if self.factors is None else numbers.mul_(self.factors[:, None])

    def outputs_at(self, first: int, count: int) -> "StoredWeight":
        """Returns the weight of ``count`` outputs from ``first`` on, as a copy."""

        def cut(part: Tensor | None) -> Tensor | None:
            return None if part is None else part[first : first + count].clone()

        codes = self.codes[first : first + count].clone()
        return StoredWeight(self.kind, self.span, codes, *map(cut, self._parts))

    def outputs_in(self, order: Tensor) -> "StoredWeight":
        """Returns the weight with its outputs in another order. order: int64 [outputs]."""
        parts = (None if part is None else part[order] for part in self._parts)
        return StoredWeight(self.kind, self.span, self.codes[order], *parts)

    def inputs_at(self, first: int, count: int) -> "StoredWeight":
        """Returns the weight of ``count`` inputs from ``first`` on. A bound inside a group splits groups.

        Raises ValueError if the number of 4 bit codes is odd.
        """
        group = gcd(self.group, first, count)

        def cut(part: Tensor | None) -> Tensor | None:
            if part is None:
                return None
            fine = part.repeat_interleave(self.group // group, 1)
            return fine[:, first // group : (first + count) // group].contiguous()

        codes = self._unpacked()[:, first : first + count]
        return StoredWeight.of(self.kind, codes.contiguous(), cut(self.scales), cut(self.zeros), self.factors)

    def _unpacked(self) -> Tensor:
        """Returns the codes, uint8 [outputs, inputs]."""
        if BITS[self.kind] == 8:
            return self.codes
        spans = self.codes.view(len(self.codes), -1, 1, self.span)
        return torch.cat([spans & 15, spans >> 4], 2).view(len(self.codes), -1)


def joined_weight(weights: Sequence[StoredWeight]) -> StoredWeight:
    """Returns a weight with the concatenated outputs of several weights of equal ``layout``."""
    first = weights[0]

    def join(parts: tuple[Tensor | None, ...]) -> Tensor | None:
        found = [part for part in parts if part is not None]
        return torch.cat(found) if found else None

    codes = torch.cat([weight.codes for weight in weights])
    parts = map(join, zip(*(weight._parts for weight in weights), strict=True))
    return StoredWeight(first.kind, first.span, codes, *parts)
