"""Stored weights with random codes, and their values computed one by one."""

from typing import Any

import torch
from torch import Tensor

from outrider.engine.kernels.stored_weight import BITS, Kind, StoredWeight

OUTPUTS, INPUTS, GROUP = 12, 192, 32
FORMS: dict[str, tuple[Kind, set[str]]] = {
    "fp8": ("e4m3", {"factors"}),
    "fp8 in blocks": ("e4m3", {"scales"}),
    "int8": ("int8", {"factors"}),
    "int4": ("int4", {"scales"}),
    "int4 with zeros": ("int4", {"scales", "zeros"}),
    "mxfp4": ("e2m1", {"scales"}),
    "nvfp4": ("e2m1", {"scales", "factors"}),
}


def codes_of(kind: Kind, *shape: int) -> Tensor:
    codes = torch.randint(0, 2 ** BITS[kind], shape).to(torch.uint8)
    return codes.where(codes & 127 < 127, 0) if kind == "e4m3" else codes  # two codes are NaN


def weight_of(form: str, seed: int = 0, outputs: int = OUTPUTS) -> tuple[StoredWeight, Tensor]:
    """Returns a weight, and its values computed one by one."""
    torch.manual_seed(seed)
    kind, parts = FORMS[form]
    groups = INPUTS // GROUP
    given: dict[str, Any] = {
        "scales": torch.rand(outputs, groups).bfloat16(),
        "zeros": torch.randint(-8, 8, (outputs, groups), dtype=torch.int16),
        "factors": torch.rand(outputs),
    }
    given = {name: part for name, part in given.items() if name in parts}
    codes = codes_of(kind, outputs, INPUTS)
    numbers = torch.tensor([[value_of(kind, int(code)) for code in row] for row in codes])
    if "zeros" in given:
        numbers = numbers - given["zeros"].repeat_interleave(GROUP, 1)
    if "scales" in given:
        numbers = numbers * given["scales"].float().repeat_interleave(GROUP, 1)
    if "factors" in given:
        numbers = numbers * given["factors"][:, None]
    return StoredWeight.of(kind, codes, **given), numbers


def moved(weight: StoredWeight, device: str) -> StoredWeight:
    """Returns the weight on a device."""
    parts: dict[str, Any] = {
        name: part.to(device) if isinstance(part, Tensor) else part for name, part in vars(weight).items()
    }
    return StoredWeight(**parts)


def value_of(kind: Kind, code: int) -> float:
    """Returns the value of a code by the definition of its kind."""
    if kind == "int8":
        return code - 256 if code > 127 else code
    if kind == "int4":
        return code - 8
    mantissa_bits, bias = (3, 7) if kind == "e4m3" else (1, 1)
    sign = -1 if code >> (BITS[kind] - 1) else 1
    code &= 2 ** (BITS[kind] - 1) - 1
    exponent, mantissa = code >> mantissa_bits, (code & (2**mantissa_bits - 1)) / 2**mantissa_bits
    return sign * (1 + mantissa if exponent else 2 * mantissa) * 2.0 ** (exponent - bias)
