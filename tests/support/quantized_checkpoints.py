"""Small checkpoints in the formats that quantized models are published in, written as their libraries do."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations import finegrained_fp8
from transformers.utils import is_compressed_tensors_available

from outrider.engine.loading import quantized_checkpoint
from outrider.engine.loading.quantized_checkpoint import REQUIREMENTS, Requirement

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = torch.finfo(FP8).max
BLOCK = 16  # outputs and inputs that have a scale in common
GROUP = 32  # inputs of one output that have a scale in common, in 4 bit
PER_INT32 = 8  # numbers of 4 bit
MIDDLE_INT4 = 8
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of MXFP4

Tensors = dict[str, Tensor]
Quantize = Callable[[Tensor], tuple[Tensors, Tensor]]  # what is stored, by suffix; what it stands for

needs_compressed_tensors = pytest.mark.skipif(
    not is_compressed_tensors_available(),
    reason="compressed-tensors is not installed: pip install 'outrider[compressed-tensors]'",
)


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
    """Packs like compressed-tensors: eight numbers of one output, the first one lowest."""
    groups = weight.view(len(weight), -1, GROUP)
    scales = groups.abs().amax(-1) / (MIDDLE_INT4 - 1)
    codes = (groups / scales[..., None]).round().clamp(-MIDDLE_INT4, MIDDLE_INT4 - 1)
    meant = (codes * scales[..., None]).view(weight.shape)
    shape = torch.tensor(weight.shape)
    packed = _packed(codes.view(weight.shape).int() + MIDDLE_INT4)
    return {"weight_packed": packed, "weight_scale": scales, "weight_shape": shape}, meant


def _packed(codes: Tensor) -> Tensor:
    """Along the last dimension, into int32."""
    shifts = 4 * torch.arange(PER_INT32)
    return (codes.long().unflatten(-1, (-1, PER_INT32)) << shifts).sum(-1).to(torch.uint32).view(torch.int32)


def mxfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Experts of gpt-oss, [experts, inputs, outputs], two codes a byte, the first one lowest."""
    groups = weight.transpose(1, 2).unflatten(-1, (-1, GROUP))
    exponents = (groups.abs().amax(-1, keepdim=True) / E2M1[-1]).log2().ceil()
    scaled = groups / exponents.exp2()
    codes = (scaled.abs()[..., None] - torch.tensor(E2M1)).abs().argmin(-1)
    meant = torch.tensor(E2M1)[codes] * scaled.sign() * exponents.exp2()
    codes = (codes + 8 * (scaled < 0)).to(torch.uint8)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    stored = {"blocks": blocks, "scales": (exponents.squeeze(-1) + 127).to(torch.uint8)}
    return stored, meant.flatten(-2).transpose(1, 2).contiguous()


def gptq(weight: Tensor) -> tuple[Tensors, Tensor]:
    stored, meant = int4_packed(weight)
    outputs, inputs = weight.shape
    codes = (meant / stored["weight_scale"].repeat_interleave(GROUP, 1)).round().int() + MIDDLE_INT4
    zeros = torch.full((inputs // GROUP, outputs), MIDDLE_INT4 - 1)
    return {
        "qweight": _packed(codes).T.contiguous(),
        "qzeros": _packed(zeros),
        "scales": stored["weight_scale"].T.contiguous().half(),
        "g_idx": torch.arange(inputs).int() // GROUP,
    }, meant


def awq(weight: Tensor) -> tuple[Tensors, Tensor]:
    stored, meant = int4_packed(weight)
    outputs, inputs = weight.shape
    codes = (meant / stored["weight_scale"].repeat_interleave(GROUP, 1)).round().int() + MIDDLE_INT4
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    shuffled = [
        rows.unflatten(-1, (-1, PER_INT32))[..., order].flatten(-2)
        for rows in (codes.T, torch.full((inputs // GROUP, outputs), MIDDLE_INT4))
    ]
    return {
        "qweight": _packed(shuffled[0]),
        "qzeros": _packed(shuffled[1]),
        "scales": stored["weight_scale"].T.contiguous().half(),
    }, meant


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
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
IN_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head", "mlp.gate"],
}
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
    "compressed int4": (int4_packed, _compressed("pack-quantized", INT4, None)),
    "gptq": (
        gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    ),
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    ),
}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"],
}
METHODS = {name: said["quant_method"] for name, (_, said) in FORMATS.items()}


def params_of(*names: str) -> list[Any]:
    """Marks of a test that loads checkpoints in these formats."""
    return [
        pytest.param(name, marks=needs_compressed_tensors if name.startswith("compressed") else ())
        for name in names
    ]


def quantize(folder: Path, name: str, into: Path) -> tuple[Path, Path]:
    """
    Args:
        folder: of a checkpoint that is not quantized.
        name: of a format.

    Returns:
        The checkpoint in that format, and one of the weights that it stands for, which is not quantized.
    """
    quantize_one, said = FORMATS[name]
    stored, meant = {}, {}
    for file in folder.glob("*.safetensors"):
        for key, weight in load_file(file).items():
            module = key.removesuffix(".weight")
            stored[key] = meant[key] = weight
            if module.endswith("proj"):
                parts, meant[key] = quantize_one(weight)
                del stored[key]
                stored |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
    return _write_both(folder, into, stored, meant, said)


def quantize_experts(folder: Path, into: Path) -> tuple[Path, Path]:
    """The same in MXFP4, of a checkpoint of gpt-oss."""
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


@contextmanager
def fp8_on_cpu() -> Iterator[None]:
    """What a GPU keeps in FP8 a CPU keeps too. Products of blocks are computed without rounding inputs."""
    with ExitStack() as undo:
        for owner, name, value in (
            (quantized_checkpoint, "multiplies_fp8", lambda device: True),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
            (finegrained_fp8, "finegrained_fp8_linear", _product_of_blocks),
        ):
            undo.enter_context(patch.object(owner, name, value))
        undo.enter_context(patch.dict(REQUIREMENTS, fp8=Requirement("fp8", {})))
        yield


def _product_of_blocks(
    rows: Tensor, codes: Tensor, scales: Tensor, block: list[int] | None, bias: Tensor | None, _: object
) -> Tensor:
    """Refuses what the kernel does: scales that are not one for each whole block, or one for all."""
    if block is not None:
        assert [size // part for size, part in zip(codes.shape, block, strict=True)] == [*scales.shape]
        scales = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return torch.nn.functional.linear(rows, (codes.float() * scales).to(rows.dtype), bias)
