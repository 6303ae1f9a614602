"""Small checkpoints in the published formats of quantized models, written as their libraries write them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = torch.finfo(FP8).max
BLOCK = 16  # outputs and inputs that share a scale
GROUP = 32  # inputs of one output that share a scale, in 4 bit
PER_INT32 = 8  # numbers of 4 bit
MIDDLE_INT4 = 8
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of MXFP4

Tensors = dict[str, Tensor]
Quantize = Callable[[Tensor], tuple[Tensors, Tensor]]  # result: stored tensors by suffix; dequantized weight


def fp8_in_blocks(weight: Tensor) -> tuple[Tensors, Tensor]:
    outputs, inputs = weight.shape
    blocks = weight.view(outputs // BLOCK, BLOCK, inputs // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)) / LARGEST_FP8
    codes = (blocks / scales[:, None, :, None]).to(FP8)
    meant = codes.float() * scales[:, None, :, None]
    return {"weight": codes.view(weight.shape), "weight_scale_inv": scales}, meant.view(weight.shape)


def fp8_by_output(weight: Tensor) -> tuple[Tensors, Tensor]:
    return _fp8(weight, weight.abs().amax(1, keepdim=True))


def fp8_in_one(weight: Tensor) -> tuple[Tensors, Tensor]:
    return _fp8(weight, weight.abs().amax().view(1))


def fp8_in_one_inverse(weight: Tensor) -> tuple[Tensors, Tensor]:
    stored, meant = fp8_in_one(weight)
    return {"weight": stored["weight"], "weight_scale_inv": stored["weight_scale"].squeeze()}, meant


def _fp8(weight: Tensor, largest: Tensor) -> tuple[Tensors, Tensor]:
    scales = largest / LARGEST_FP8
    codes = (weight / scales).to(FP8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def int4_packed(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Packs like compressed-tensors: eight numbers of one output, the first in the lowest bits."""
    groups = weight.view(len(weight), -1, GROUP)
    scales = groups.abs().amax(-1) / (MIDDLE_INT4 - 1)
    codes = (groups / scales[..., None]).round().clamp(-MIDDLE_INT4, MIDDLE_INT4 - 1)
    meant = (codes * scales[..., None]).view(weight.shape)
    shape = torch.tensor(weight.shape)
    packed = _packed(codes.view(weight.shape).int() + MIDDLE_INT4)
    return {"weight_packed": packed, "weight_scale": scales, "weight_shape": shape}, meant


def _packed(codes: Tensor) -> Tensor:
    """Packs 4-bit codes along the last dimension into int32."""
    shifts = 4 * torch.arange(PER_INT32)
    return (codes.long().unflatten(-1, (-1, PER_INT32)) << shifts).sum(-1).to(torch.uint32).view(torch.int32)


def mxfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Packs experts of gpt-oss, [experts, inputs, outputs]: two codes per byte, the first in the low bits."""
    groups = weight.transpose(1, 2).unflatten(-1, (-1, GROUP))
    exponents = (groups.abs().amax(-1, keepdim=True) / E2M1[-1]).log2().ceil()
    scaled = groups / exponents.exp2()
    codes = (scaled.abs()[..., None] - torch.tensor(E2M1)).abs().argmin(-1)
    meant = torch.tensor(E2M1)[codes] * scaled.sign() * exponents.exp2()
    codes = (codes + 8 * (scaled < 0)).to(torch.uint8)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    stored = {"blocks": blocks, "scales": (exponents.squeeze(-1) + 127).to(torch.uint8)}
    return stored, meant.flatten(-2).transpose(1, 2).contiguous()


def int8_by_output(weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def int4_uneven(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Packs like compressed-tensors with a zero point for each group, packed along the outputs."""
    codes, zeros, scales, meant = _uneven(weight)
    stored = {
        "weight_packed": _packed(codes),
        "weight_scale": scales,
        "weight_zero_point": _packed(zeros.T).T.contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return stored, meant


def _uneven(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns codes [outputs, inputs], zeros and scales [outputs, groups], and the dequantized weight."""
    groups = weight.view(len(weight), -1, GROUP)
    least, most = groups.amin(-1), groups.amax(-1)
    scales = ((most - least) / 15).half().float()
    zeros = (-least / scales).round().clamp(0, 15)
    codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
    meant = (codes - zeros[..., None]) * scales[..., None]
    return codes.view(weight.shape).int(), zeros.int(), scales, meant.view(weight.shape)


def gptq(weight: Tensor, less: int = 1) -> tuple[Tensors, Tensor]:
    codes, zeros, scales, meant = _uneven(weight)
    return {
        "qweight": _packed(codes).T.contiguous(),
        "qzeros": _packed(zeros.T.clamp(min=less) - less),
        "scales": scales.T.contiguous().half(),
        "g_idx": torch.arange(weight.shape[1]).int() // GROUP,
    }, meant


def gptq_2(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Stores zero points without GPTQ's offset of 1."""
    return gptq(weight, 0)


def awq(weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, zeros, scales, meant = _uneven(weight)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    shuffled = [rows.unflatten(-1, (-1, PER_INT32))[..., order].flatten(-2) for rows in (codes.T, zeros.T)]
    return {
        "qweight": _packed(shuffled[0]),
        "qzeros": _packed(shuffled[1]),
        "scales": scales.T.contiguous().half(),
    }, meant


def _e2m1(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes, two per byte, the first in the low bits, and dequantized weights.

    scales: [outputs, groups].
    """
    scaled = weight.view(*scales.shape, -1) / scales[..., None]
    codes = (scaled.abs()[..., None] - torch.tensor(E2M1)).abs().argmin(-1)
    meant = torch.tensor(E2M1)[codes] * scaled.sign() * scales[..., None]
    codes = (codes + 8 * (scaled < 0)).to(torch.uint8).view(weight.shape)
    return codes[:, ::2] | codes[:, 1::2] << 4, meant.view(weight.shape)


def nvfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Packs like modelopt: an FP8 scale per 16 inputs, and a scale for the whole weight."""
    of_all = weight.abs().amax() / (E2M1[-1] * LARGEST_FP8)
    groups = weight.view(len(weight), -1, 16).abs().amax(-1)
    scales = (groups / E2M1[-1] / of_all).to(FP8)
    packed, meant = _e2m1(weight, scales.float() * of_all)
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": of_all}, meant


def nvfp4_packed(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Packs like compressed-tensors: the reciprocal of the scale for the whole weight is stored."""
    stored, meant = nvfp4(weight)
    of_all = stored["weight_scale_2"].reciprocal().view(1)
    return {
        "weight_packed": stored["weight"],
        "weight_scale": stored["weight_scale"],
        "weight_global_scale": of_all,
    }, meant


def mxfp4_packed(weight: Tensor) -> tuple[Tensors, Tensor]:
    exponents = (weight.view(len(weight), -1, GROUP).abs().amax(-1) / E2M1[-1]).log2().ceil()
    packed, meant = _e2m1(weight, exponents.exp2())
    return {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}, meant


def _compressed(file_format: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": scheme},
    }


INPUTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
FP8_BY = {"num_bits": 8, "type": "float"}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
IN_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head", "mlp.gate"],
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head", "*mlp.gate"]}
FORMATS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "fp8": (fp8_in_blocks, {**IN_FP8, "weight_block_size": [BLOCK, BLOCK]}),
    "fp8, one scale": (fp8_in_one_inverse, {**IN_FP8, "weight_block_size": None}),
    "compressed fp8": (
        fp8_by_output,
        _compressed("float-quantized", {**FP8_BY, "strategy": "channel"}, INPUTS),
    ),
    "compressed fp8, one scale": (
        fp8_in_one,
        _compressed("float-quantized", {**FP8_BY, "strategy": "tensor"}, INPUTS),
    ),
    "compressed int8": (
        int8_by_output,
        _compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, INPUTS),
    ),
    "compressed int4": (int4_packed, _compressed("pack-quantized", INT4, None)),
    "compressed int4, zeros": (
        int4_uneven,
        _compressed("pack-quantized", {**INT4, "symmetric": False}, None),
    ),
    "compressed nvfp4": (nvfp4_packed, _compressed("nvfp4-pack-quantized", FP4, None)),
    "compressed mxfp4": (mxfp4_packed, _compressed("mxfp4-pack-quantized", {**FP4, "group_size": 32}, None)),
    "modelopt fp8": (fp8_in_one, {**MODELOPT, "quant_algo": "FP8"}),
    "modelopt nvfp4": (nvfp4, {**MODELOPT, "quant_algo": "NVFP4"}),
    "gptq": (gptq, GPTQ),
    "gptq, second version": (gptq_2, {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    ),
}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"],
}


def quantize(folder: Path, name: str, into: Path) -> tuple[Path, Path]:
    """Quantizes a checkpoint.

    Args:
        folder: checkpoint that is not quantized.
        name: a key of FORMATS.

    Returns:
        Folders of the quantized checkpoint, and of a checkpoint with its dequantized weights.
    """
    quantize_one, said = FORMATS[name]
    stored, meant = {}, {}
    for file in folder.glob("*.safetensors"):
        for key, weight in load_file(file).items():
            module = key.removesuffix(".weight")
            stored[key] = meant[key] = weight
            if module.endswith(("proj", ".w1", ".w2", ".w3")):  # w1 to w3: names in Mixtral's experts
                parts, meant[key] = quantize_one(weight)
                del stored[key]
                stored |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
    return _write_both(folder, into, stored, meant, said)


def quantize_experts(folder: Path, into: Path) -> tuple[Path, Path]:
    """Quantizes the experts of a gpt-oss checkpoint to MXFP4. Returns the same as ``quantize``."""
    stored, meant = {}, {}
    for key, weight in load_file(folder / "model.safetensors").items():
        stored[key] = meant[key] = weight
        if key.endswith("_proj") and weight.ndim == 3:
            parts, meant[key] = mxfp4(stored.pop(key))
            stored |= {f"{key}_{suffix}": part for suffix, part in parts.items()}
    return _write_both(folder, into, stored, meant, MXFP4)


def _write_both(
    folder: Path, into: Path, stored: Tensors, meant: Tensors, said: dict[str, Any]
) -> tuple[Path, Path]:
    config = json.loads((folder / "config.json").read_text())
    for tensors, kind, fields in ((stored, "quantized", {"quantization_config": said}), (meant, "meant", {})):
        (into / kind).mkdir(parents=True)
        save_file(tensors, into / kind / "model.safetensors", {"format": "pt"})
        (into / kind / "config.json").write_text(json.dumps({**config, **fields}))
    return into / "quantized", into / "meant"
