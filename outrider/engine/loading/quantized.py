"""Linear layers with 8 and 4 bit weights, quantized from the checkpoint's weights at load.

On a GPU they are stored weights (outrider/engine/kernels/stored_weight.py): 8 bit has a scale per output,
4 bit a scale and a zero per 32 weights. Activations are not quantized. On a CPU there are faster products:

8 bit: a scale per output. Each row of activations is quantized to 8 bits by its own scale, and sums are exact
(outrider/engine/loading/int8_product.py). So a row's result is bit for bit the same in any batch.

4 bit: a minimum and a step per 32 weights. Activations are not quantized. It is fast for one or two rows, and
slower with each further row.

The output projection, and layers whose shapes 4 bit does not support, are quantized to 8 bit.
"""

from functools import cache, partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.experts import SingleExperts
from outrider.engine.forward.linear import NEAR, StoredLinear, joined, linear_groups, replace, tried_outputs
from outrider.engine.kernels.stored_weight import MIDDLE_INT4, StoredWeight
from outrider.engine.loading.int8_product import LARGEST_INT8, ZERO_UINT8, int8_product
from outrider.engine.models.registry import joined_products
from outrider.engine.settings import Quantization

GROUP = 32  # weights of one output that share a scale in 4 bit
LARGEST_INT4 = 15
OUTPUTS_INT4 = 16  # a layer in 4 bit has a multiple of this number of outputs on a CPU
SMALLEST_SCALE = 1e-12  # scale in place of 0
TRIED_ROWS = 5  # more than the one or two rows for which kernels have special paths


class Int8Linear(nn.Module):
    """`nn.Linear` for inference with 8 bit weights and inputs."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """
        Args:
            weight: [out_features, in_features], floating point
            bias: [out_features]
        """
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach()
        weight = weight.detach().float()
        scales = weight.abs().amax(1).clamp_min(SMALLEST_SCALE) / LARGEST_INT8
        codes = (weight / scales[:, None]).round_().to(torch.int8)
        self.multiply = int8_product(codes, scales / LARGEST_INT8)  # with the divisor of the inputs' scale

    def forward(self, rows: Tensor) -> Tensor:
        """Returns [..., out_features] of rows [..., in_features]."""
        flat = rows.reshape(-1, self.in_features)
        largest = torch.linalg.vector_norm(flat, torch.inf, -1, keepdim=True, dtype=torch.float32)
        largest.clamp_min_(SMALLEST_SCALE)
        codes = torch.mul(flat, LARGEST_INT8 / largest).round_().add_(ZERO_UINT8).to(torch.uint8)
        result = self.multiply(codes).mul_(largest)
        result = result.to(rows.dtype).view(*rows.shape[:-1], self.out_features)
        return result if self.bias is None else result + self.bias


class Int4Linear(nn.Module):
    """`nn.Linear` for inference with 4 bit weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """
        Args:
            weight: [out_features, in_features], multiples of 16 and 32, floating point
            bias: [out_features]
        """
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach()
        groups = weight.detach().float().view(self.out_features, -1, GROUP)
        least, most = groups.amin(-1), groups.amax(-1)
        steps = ((most - least) / LARGEST_INT4).clamp_min(SMALLEST_SCALE)
        codes = ((groups - least[..., None]) / steps[..., None]).round_().clamp_(0, LARGEST_INT4)
        codes = codes.to(torch.int32).view(weight.shape)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        # torch's kernel computes (code - 8) * step + the second number.
        rule = torch.stack([steps, least + MIDDLE_INT4 * steps], -1)  # [out_features, groups, 2]
        self.rule = rule.transpose(0, 1).contiguous().to(weight.dtype)

    def forward(self, rows: Tensor) -> Tensor:
        """Returns [..., out_features] of rows [..., in_features]."""
        flat = rows.reshape(-1, self.in_features)
        result: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.packed, GROUP, self.rule)
        result = result.view(*rows.shape[:-1], self.out_features)
        return result if self.bias is None else result + self.bias


def stored_weight(weight: Tensor, quantization: Quantization) -> StoredWeight:
    """Returns the weight quantized to 8 bit, or to 4 bit if that is wanted and inputs form whole groups.

    weight: [outputs, inputs], floating point
    """
    outputs, inputs = weight.shape
    numbers = weight.float()
    if quantization == "int8" or inputs % GROUP:
        factors = numbers.abs().amax(1).clamp_min(SMALLEST_SCALE) / LARGEST_INT8
        return StoredWeight.of("int8", (numbers / factors[:, None]).round().to(torch.int8), factors=factors)
    groups = numbers.view(outputs, -1, GROUP)
    least, most = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)  # so that 0 has a code
    steps = ((most - least) / LARGEST_INT4).to(weight.dtype)
    steps = steps.where(steps > 0, 1)
    zeros = (-least / steps).round()
    codes = ((groups / steps[..., None]).round() + zeros[..., None]).clamp(0, LARGEST_INT4)
    zeros = (zeros - MIDDLE_INT4).to(torch.int16)
    return StoredWeight.of("int4", codes.to(torch.uint8).view(outputs, inputs), steps, zeros)


def quantize(model: PreTrainedModel, quantization: Quantization, device: torch.device) -> None:
    """Replaces each linear layer by a quantized layer on the device, in place.

    Embeddings, norms and experts stay as they are.

    Raises:
        UnsupportedModelError: this machine has no correct product in 4 bit, or the model no linear layer.
    """
    head = model.get_output_embeddings()
    of_head = set() if head is None else {*head.modules()}
    is_quantized = False
    same_input = joined_products(model)
    experts = [module for module in model.modules() if isinstance(module, SingleExperts)]
    of_experts = {part for module in experts for part in module.modules()}
    for module in [module for module in model.modules() if module not in of_experts]:
        for names in linear_groups(module, same_input, (nn.Linear, StoredLinear)):
            layers = [getattr(module, name) for name in names]
            projections = [_widened(layer, model.dtype) for layer in layers]
            given = "int8" if of_head.intersection(layers) else quantization
            replace(module, names, projections, partial(_quantized, given, device))
            is_quantized = True
    if not is_quantized:
        raise UnsupportedModelError(
            f"quantization={quantization!r}: {type(model).__name__} has no nn.Linear; leave it unset"
        )


def _widened(layer: nn.Linear | StoredLinear, dtype: torch.dtype) -> nn.Linear:
    """Returns the layer, with a dequantized weight if its weight is stored quantized."""
    return joined(layer.weight.widened().to(dtype), layer.bias) if isinstance(layer, StoredLinear) else layer


def _quantized(
    quantization: Quantization, device: torch.device, weight: Tensor, bias: Tensor | None
) -> nn.Module:
    if device.type == "cuda":
        bias = None if bias is None else bias.detach().to(device)
        return StoredLinear(stored_weight(weight.detach().to(device), quantization), bias)
    outputs, inputs = weight.shape
    if quantization == "int8" or outputs % OUTPUTS_INT4 or inputs % GROUP:
        return Int8Linear(weight, bias)
    reason = why_no_int4(weight.dtype, outputs, inputs)
    if reason is not None:
        raise UnsupportedModelError(
            f"quantization='int4': {reason}; quantization='int8' works on any processor"
        )
    return Int4Linear(weight, bias)


@cache
def why_no_int4(dtype: torch.dtype, outputs: int, inputs: int) -> str | None:
    """Returns why this machine has no product in 4 bit of this type and size; None if it has such a product.

    Tries a product of that size once, since torch's operators are no public API.
    """
    generator = torch.Generator().manual_seed(0)
    # Codes of 4 bit represent these weights exactly, so a difference comes from the kernel.
    weight = torch.randint(0, LARGEST_INT4 + 1, (tried_outputs(outputs), inputs), generator=generator).float()
    weight.view(len(weight), -1, GROUP)[..., :2] = torch.tensor([0.0, LARGEST_INT4])
    rows = torch.randn(TRIED_ROWS, inputs, generator=generator)
    expected = rows @ weight.t()
    try:
        product = Int4Linear(weight.to(dtype), None)(rows.to(dtype))
    except (AttributeError, RuntimeError) as error:
        return str(error)
    if (product.float() - expected).norm() <= NEAR[dtype] * expected.norm():
        return None
    return f"a product of {outputs} outputs by {inputs} inputs in 4 bit is wrong on this processor"
