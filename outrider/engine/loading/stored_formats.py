"""Formats in which quantized checkpoints store the weight of a linear layer, each read into a StoredWeight.

    fp8                  weight; weight_scale_inv per block of outputs and inputs, or per tensor
    compressed-tensors   weight or weight_packed; weight_scale per output, group, block or tensor
    modelopt             weight; weight_scale per tensor; NVFP4: per group, and weight_scale_2 per tensor
    mxfp4                all experts of a layer: blocks and scales
    awq, gptq            qweight, qzeros, scales

Scales of activations are ignored: activations are not quantized.
"""

from collections.abc import Callable, Mapping
from math import gcd
from typing import Any

import torch
from torch import Tensor

from outrider.engine.kernels.stored_weight import MIDDLE_INT4, Kind, StoredWeight

Read = Callable[[str], Tensor | None]  # takes the end of a name, returns the tensor; None: no such tensor

METHODS = ("awq", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4")
# Ends of the names of tensors that hold codes, and of the tensors that belong to them.
CODES = (".weight", ".weight_packed", ".qweight", "_blocks")
BESIDE = (
    *(".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale", ".weight_shape"),
    *(".weight_zero_point", ".weight_g_idx", ".qzeros", ".scales", ".g_idx", "_scales"),
    *(".input_scale", ".input_global_scale", ".input_zero_point"),
)
KINDS: dict[torch.dtype, Kind] = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8", torch.uint8: "e2m1"}
USUAL_BLOCK = [128, 128]  # outputs and inputs that share a scale, if the config names no block
PLACES_OF_AWQ = [0, 4, 1, 5, 2, 6, 3, 7]  # places of eight neighbouring columns within 32 bits
GPTQ_1, GPTQ_2 = "gptq", "gptq_v2"  # values of checkpoint_format
MIDDLE_INT8 = 128  # unsigned 8 bit code of the integer 0
EXPONENT_AT = 7  # lowest bit of the exponent of a bfloat16


def read_weight(read: Read, quantization: Mapping[str, Any], inputs: int | None = None) -> StoredWeight:
    """Reads the weight of a linear layer, or the joined weights of all experts of a layer.

    Args:
        read: returns the tensors of the layer; tensors on the meta device give a weight there.
        quantization: ``quantization_config`` of the checkpoint.
        inputs: input features of the layer; None: they follow from its tensors.

    Raises:
        ValueError: the tensors do not match their format.
    """
    if (blocks := read("_blocks")) is not None:  # uint8 [experts, outputs, groups, bytes]
        scales = _wanted(read, "_scales").flatten(0, 1)
        return StoredWeight.of("e2m1", _halves(blocks.flatten(0, 1).flatten(1)), _powers(scales))
    if (packed := read(".qweight")) is not None:
        is_awq = quantization["quant_method"] == "awq"
        return (_of_awq if is_awq else _of_gptq)(packed, read, quantization, inputs)
    packed = read(".weight_packed")
    if packed is not None and packed.dtype == torch.int32:
        return _of_integers(packed, read, inputs)
    return _of_rows(_wanted(read, ".weight") if packed is None else packed, read, quantization)


def _wanted(read: Read, name: str) -> Tensor:
    found = read(name)
    if found is None:
        raise ValueError(f"it has no {name[1:]}")
    return found


def _of_rows(codes: Tensor, read: Read, quantization: Mapping[str, Any]) -> StoredWeight:
    """Reads floating point or int8 codes, which are stored in the order of the inputs."""
    kind = KINDS.get(codes.dtype)
    if kind is None:
        raise ValueError(f"its codes are {codes.dtype}")
    codes = _halves(codes) if kind == "e2m1" else codes
    outputs, inputs = codes.shape
    zeros, scales = read(".weight_zero_point"), read(".weight_scale_inv")
    scales = _wanted(read, ".weight_scale") if scales is None else scales
    factors = read(".weight_scale_2")
    if (divisor := read(".weight_global_scale")) is not None:
        factors = divisor.float().reciprocal()
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scales = _powers(scales)
    elif kind == "e2m1" and (scales.itemsize > 1 or factors is None):
        raise ValueError(f"its scales are {scales.dtype}, and those of 4 bit floats have a byte")
    if scales.numel() == 1 or scales.shape == (outputs,):
        scales = scales.view(-1, 1).expand(outputs, 1)
    height, width = 1, inputs // scales.shape[1]
    if len(scales) != outputs:
        height, width = _block(quantization)
    wanted = [-(-outputs // height), -(-inputs // width)]
    if [*scales.shape] != wanted:
        raise ValueError(f"its scales are {[*scales.shape]} and must be {wanted}")
    group = gcd(width, inputs)

    def of_each(part: Tensor) -> Tensor:
        of_outputs = part.repeat_interleave(height, 0)[:outputs]
        return of_outputs.repeat_interleave(width // group, 1)[:, : inputs // group].contiguous()

    if zeros is factors is None and scales.shape[1] == 1:
        return StoredWeight.of(kind, codes, factors=of_each(scales.float()).flatten())
    scales = of_each(scales.bfloat16() if scales.itemsize == 1 else scales)  # exact for FP8
    zeros = None if zeros is None else of_each(zeros.to(torch.int16).view(-1, wanted[1]))
    factors = None if factors is None else factors.float().flatten().expand(outputs).contiguous()
    return StoredWeight.of(kind, codes, scales, zeros, factors)


def _block(quantization: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the outputs and inputs that share a scale."""
    groups = (quantization.get("config_groups") or {}).values()
    named = [(group.get("weights") or {}).get("block_structure") for group in groups]
    outputs, inputs = next(filter(None, [quantization.get("weight_block_size"), *named]), USUAL_BLOCK)
    return int(outputs), int(inputs)


def _of_integers(packed: Tensor, read: Read, inputs: int | None) -> StoredWeight:
    """Reads integers of compressed-tensors, which packs neighbouring inputs into 32 bits."""
    if inputs is None:
        inputs = int(_wanted(read, ".weight_shape")[1])
    scales, zeros = _wanted(read, ".weight_scale"), read(".weight_zero_point")
    _check_order(read(".weight_g_idx"), scales.shape[1])
    bits = packed.shape[1] * 32 // inputs
    if zeros is not None:  # neighbouring outputs are packed into 32 bits
        zeros = _integers(zeros.T, bits)[:, : len(packed)].T
    return _of_unsigned(_integers(packed, bits), bits, scales, zeros)


def _of_awq(packed: Tensor, read: Read, quantization: Mapping[str, Any], inputs: int | None) -> StoredWeight:
    """Reads AWQ's codes [inputs, outputs] and zeros [groups, outputs], both packed by outputs."""
    if (version := quantization.get("version", "gemm").lower()) != "gemm":
        raise ValueError(f"version={version!r} of AWQ is not served, 'gemm' is")
    scales, zeros = _wanted(read, ".scales"), _wanted(read, ".qzeros")
    bits = packed.shape[1] * 32 // scales.shape[1]

    def in_order(part: Tensor) -> Tensor:
        eights = _integers(part, bits).view(len(part), -1, len(PLACES_OF_AWQ))
        return eights[:, :, PLACES_OF_AWQ].flatten(1).T

    return _of_unsigned(in_order(packed), bits, scales.T, in_order(zeros))


def _of_gptq(packed: Tensor, read: Read, quantization: Mapping[str, Any], inputs: int | None) -> StoredWeight:
    """Reads GPTQ's codes [inputs, outputs], packed by inputs, and zeros [groups, outputs], by outputs."""
    form, scales = quantization.get("checkpoint_format", "gptq"), _wanted(read, ".scales")
    if form not in (GPTQ_1, GPTQ_2):
        raise ValueError(f"checkpoint_format={form!r} is not served, {GPTQ_1!r} and {GPTQ_2!r} are")
    bits = int(quantization["bits"]) if inputs is None else len(packed) * 32 // inputs
    _check_order(read(".g_idx"), len(scales))
    zeros = _integers(_wanted(read, ".qzeros"), bits).to(torch.int16)
    zeros = zeros + 1 if form == GPTQ_1 else zeros  # the first version stores zeros minus 1
    return _of_unsigned(_integers(packed.T, bits), bits, scales.T, zeros.T)


def _check_order(group_of_each: Tensor | None, groups: int) -> None:
    """Checks that groups consist of neighbouring inputs.

    group_of_each: [inputs] group of each input; None: groups are known to be in order.
    """
    if group_of_each is None or group_of_each.is_meta:
        return
    inputs = len(group_of_each)
    usual = torch.arange(inputs, device=group_of_each.device) // (inputs // groups)
    if not torch.equal(group_of_each, usual.to(group_of_each.dtype)):
        raise ValueError("its groups are of inputs in the order of activations (desc_act, actorder)")


def _of_unsigned(codes: Tensor, bits: int, scales: Tensor, zeros: Tensor | None) -> StoredWeight:
    """Returns a weight of unsigned integers; without ``zeros`` the middle code stands for 0."""
    middle = MIDDLE_INT4 if bits == 4 else MIDDLE_INT8
    zeros = None if zeros is None else (zeros.to(torch.int16) - middle).contiguous()
    scales = scales.expand(len(codes), -1).contiguous()
    codes = codes if bits == 4 else codes ^ MIDDLE_INT8
    return StoredWeight.of("int4" if bits == 4 else "int8", codes.contiguous(), scales, zeros)


def _integers(packed: Tensor, bits: int) -> Tensor:
    """Unpacks 32 bit words [rows, words] into 4 or 8 bit numbers [rows, columns], lowest bits first."""
    if bits not in (4, 8):
        raise ValueError(f"its codes have {bits} bits, and 4 and 8 are read")
    whole = packed.contiguous().view(torch.uint8)
    return _halves(whole) if bits == 4 else whole


def _halves(packed: Tensor) -> Tensor:
    """Unpacks bytes [rows, bytes] into 4 bit numbers [rows, 2 * bytes], the low half of each byte first."""
    return torch.stack([packed & 15, packed >> 4], 2).flatten(1)


def _powers(exponents: Tensor) -> Tensor:
    """Returns powers of 2, bfloat16, from 8 bit exponents with the bias of floating point."""
    return (exponents.view(torch.uint8).to(torch.int16) << EXPONENT_AT).view(torch.bfloat16)
