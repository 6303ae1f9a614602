"""Bytes, operations and launches of a model's step, and its time by a data sheet."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from outrider.engine.cache.paged_cache import LayerShape
from outrider.engine.planning.memory import block_bytes
from outrider.engine.planning.skeleton import ModelSkeleton
from outrider.engine.settings import EngineSettings

MEMORY, ARITHMETIC = 0.8, 0.5  # shares of the peaks that are reached
# Seconds of a step apart from its model: its graph's launch, choosing tokens, the host's part.
STEP_S = 0.5e-3
ALL_REDUCE_S = 12.5e-6  # seconds for a few hundred KB between devices of one machine
SPLIT_INPUTS = ("rowwise", "rowwise_rep", "embedding_rowwise")  # styles after which devices add up outputs


@dataclass(frozen=True)
class Accelerator:
    """Peaks of a device in its maker's data sheet."""

    bytes_per_s: float
    flops_per_s: float  # operations of products in bfloat16, without sparsity


ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {
        "A10G": Accelerator(600e9, 70e12),
        "A100": Accelerator(2.04e12, 312e12),
        "B200": Accelerator(8.0e12, 2250e12),
        "H100": Accelerator(3.35e12, 989e12),
        "H200": Accelerator(4.8e12, 989e12),
        "L4": Accelerator(300e9, 121e12),
        "L40S": Accelerator(864e9, 362e12),
    }
)


@dataclass(frozen=True)
class StepCosts:
    """Costs of a step on each of the devices that share a model."""

    weight_bytes: int  # read once a step
    cache_bytes_per_token: float  # read for each token of context, once a step and sequence
    flops_per_token: float  # operations of products with weights
    flops_per_looked_at: float  # operations of attention, for each pair of a token and a token before it
    kernels: int  # launches of a pass that is not captured
    all_reduces: int

    def read(self, context_tokens: float) -> float:
        """Returns the bytes that a step reads. context_tokens: sum over its sequences."""
        return self.weight_bytes + self.cache_bytes_per_token * context_tokens

    def flops(self, sequences: float, tokens: float, context: float) -> float:
        """Returns the operations of a step. tokens, context: tokens and context of each sequence."""
        return sequences * tokens * (self.flops_per_token + self.flops_per_looked_at * context)

    def seconds(self, accelerator: Accelerator, sequences: float, tokens: float, context: float) -> float:
        """Returns the seconds of a step: the longer of reading and computing, and the rest.

        Arguments: those of ``flops``.
        """
        reading = self.read(sequences * context) / (MEMORY * accelerator.bytes_per_s)
        computing = self.flops(sequences, tokens, context) / (ARITHMETIC * accelerator.flops_per_s)
        return self.constant_s + max(reading, computing)

    @property
    def constant_s(self) -> float:
        return STEP_S + self.all_reduces * ALL_REDUCE_S


def step_costs(model: ModelSkeleton, settings: EngineSettings, *, on_cuda: bool = True) -> StepCosts:
    """Returns the costs of the model on ``settings.tensor_parallel`` devices."""
    devices = settings.tensor_parallel
    layers = model.layers_of(devices)
    weights = model.weight_bytes(devices, settings.quantization, on_cuda=on_cuda)
    passed = model.counted_pass()
    heads = -(-model.query_heads // devices)
    return StepCosts(
        weight_bytes=weights - model.looked_up_bytes(devices),
        cache_bytes_per_token=block_bytes(settings, layers, model.dtype) / settings.block_size,
        flops_per_token=passed.flops_per_token / devices,
        flops_per_looked_at=_attention_flops(heads, layers),
        kernels=passed.kernels + len(layers),  # each layer also writes into its cache
        all_reduces=model.modules_in(SPLIT_INPUTS) if devices > 1 else 0,
    )


def _attention_flops(query_heads: int, layers: Mapping[int, LayerShape]) -> float:
    """Returns a product and a sum for each dimension of a key, and of a value, in all heads and layers."""
    return sum(2.0 * query_heads * (key_dim + value_dim) for _, key_dim, value_dim in layers.values())
