"""Formats are read as the libraries read them that define them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from outrider.engine.loading.stored_formats import read_weight
from tests.support.quantized_checkpoints import FORMATS, mxfp4

WEIGHT = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))


def read(stored: dict[str, Tensor], said: dict[str, Any]) -> Tensor:
    return read_weight(lambda end: stored.get(end.removeprefix(".")), said, WEIGHT.shape[1]).widened()


@pytest.mark.parametrize(
    "name", ["compressed int4", "compressed int4, zeros", "compressed nvfp4", "compressed mxfp4"]
)
def test_packed_format_is_read_as_compressed_tensors_reads_it(name: str) -> None:
    library = pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    quantize_one, said = FORMATS[name]
    stored, _ = quantize_one(WEIGHT)
    scheme = library.quantization.QuantizationScheme(**said["config_groups"]["group_0"])
    compressor = library.compressors.BaseCompressor.load_from_registry(said["format"])
    expected = compressor.decompress(stored, scheme)["weight"]
    rounding = torch.finfo(torch.bfloat16).eps if "fp4" in name else 1e-6  # its 4 bit floats are bfloat16
    torch.testing.assert_close(read(stored, said), expected.float(), rtol=rounding, atol=0.0)


def test_experts_of_gpt_oss_are_read_as_transformers_reads_them() -> None:
    stored, _ = mxfp4(torch.stack([WEIGHT.T, WEIGHT.T * 3]))
    expected = convert_moe_packed_tensors(stored["blocks"], stored["scales"], dtype=torch.float32)
    named = {f"_{name}": part for name, part in stored.items()}
    found = read_weight(named.get, {"quant_method": "mxfp4"}).widened()
    assert torch.equal(found.view(2, *WEIGHT.shape).transpose(1, 2), expected)


def test_eight_bit_integers_of_gptq_are_read() -> None:
    codes, zeros = torch.randint(0, 256, (128, 8)), torch.randint(0, 255, (4, 8))
    scales = torch.rand(4, 8)
    stored = {
        "qweight": packed(codes.T).T.contiguous(),
        "qzeros": packed(zeros),
        "scales": scales,
    }
    expected = (codes - zeros.repeat_interleave(32, 0) - 1) * scales.repeat_interleave(32, 0)
    said = {"quant_method": "gptq", "bits": 8}
    torch.testing.assert_close(read(stored, said), expected.T)


def packed(codes: Tensor) -> Tensor:
    """Packs four codes [rows, columns] of 8 bit into 32 bits."""
    return codes.to(torch.uint8).contiguous().view(torch.int32)


@pytest.mark.parametrize("name", FORMATS)
def test_format_without_content_is_read_into_the_same_form(name: str) -> None:
    quantize_one, said = FORMATS[name]
    stored, _ = quantize_one(WEIGHT)

    def form(tensors: dict[str, Tensor]) -> Any:
        weight = read_weight(lambda end: tensors.get(end.removeprefix(".")), said, WEIGHT.shape[1])
        return weight.layout, weight.shape, weight.num_bytes

    assert form({key: tensor.to("meta") for key, tensor in stored.items()}) == form(stored)
