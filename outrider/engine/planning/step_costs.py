"""Cost model of a step: what the device reads, computes, exchanges and launches, and what the host does."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from outrider.engine.cache.key_values import LayerShape
from outrider.engine.forward.graphs import CAPTURED_SIZES
from outrider.engine.forward.kernel import PROGRAMS
from outrider.engine.inputs.context_parts import PARTS, SECOND, SHORTEST, third_length
from outrider.engine.inputs.paged_input import FEW_QUERIES, LINES_OF_LATENTS
from outrider.engine.planning.accelerators import ARITHMETIC, ATTENTION, Accelerator
from outrider.engine.planning.memory import block_bytes
from outrider.engine.planning.skeleton import ModelSkeleton
from outrider.engine.settings import EngineSettings
from outrider.pace.experts import NO_EXPERTS, ExpertsRead
from outrider.pace.step import StepSize

KERNEL_S = 1.67e-6  # seconds of a small kernel in a graph: H100, 30 per layer took 1.6 ms of an 8B's step
LAUNCH_S = 50e-6  # seconds for the host to launch a kernel without a graph: H100, steps without graphs
SLOTS, SLOTS_S = 128, 1.75e-6  # slots that attention reads at a time, and seconds for that: an estimate
KERNELS_OF_PASS = 32  # kernels outside layers: embedding, rotation, logits, checks of the cache, choice
SPLIT_INPUTS = ("rowwise", "rowwise_rep", "embedding_rowwise")  # styles after which devices sum outputs
GATHERED_OUTPUT = ("colwise_gather_output",)  # style of an output projection whose logits rank 0 gathers


@dataclass(frozen=True)
class HostCosts:
    """Seconds of the host for a step, without waiting for the device."""

    step_s: float
    sequence_s: float
    row_s: float  # seconds for each token that is decoded or verified

    def seconds(self, size: StepSize) -> float:
        return self.step_s + self.sequence_s * size.sequences + self.row_s * size.tokens


@dataclass(frozen=True)
class ExchangeCosts:
    """Cost of a sum over the ranks of one machine."""

    latency_s: float
    share: float = 1.0  # seconds per byte, relative to NCCL


# Steps on an H200 took longer than their work on the device. The difference was 0.6 ms, 2.3 us per sequence
# and 1.8 us per token (bench/results/on_device.json). It does not include scheduling and the distribution of
# tokens, which are estimated: 0.2 ms, and about 2.3 us more per sequence.
HOST = HostCosts(0.8e-3, 5e-6, 1.8e-6)
# The positions of a Draft are graph replays that do not wait for the host.
NO_HOST = HostCosts(0.0, 0.0, 0.0)
# NCCL in a graph takes 10 to 13 us for 16 KB over NVLink, an estimate.
NCCL = ExchangeCosts(12e-6)
# Seconds to send a step to the ranks of a node: 0.03 ms at rank 0, measured on a CPU, plus their wake-up.
SEND_S = 0.05e-3


@dataclass(frozen=True)
class StepCosts:
    """Costs of a step on each of the devices that share a model.

    The time of a step depends on how steps follow each other. In rounds the device waits for the host. Plain
    decoding launches a step before the host knows the previous step's tokens, so the slower of host and
    device determines the time. The positions of a Draft after the first position do not involve the host.
    """

    weight_bytes: int  # bytes that each step reads once, whatever its size
    cache_bytes_per_token: float  # bytes read for each token of context, once per step and sequence
    flops_per_token: float  # operations of products with weights
    flops_per_looked_at: float  # operations of attention, for each pair of a token and a token before it
    kernels: int  # kernels of a pass
    layers: int = 0  # layers with attention
    programs: int = 1  # attention programs for each part of a sequence's context
    third_part: int = SHORTEST  # slots of a part of the third length
    all_reduces: int = 0
    row_bytes: int = 0  # bytes of a token in each all-reduce
    logit_bytes: int = 0  # bytes of a token's logits that rank 0 gathers
    exchange: ExchangeCosts = NCCL
    host: HostCosts = HOST
    following_host: HostCosts = HOST  # costs of the host for a step that is launched early
    has_graphs: bool = True
    expert_bytes: int = 0  # bytes of all experts; a step reads those that its tokens choose
    experts: ExpertsRead = NO_EXPERTS  # share of experts that a step reads, by the size of the step

    def weights_read(self, sequences: float, tokens: float) -> float:
        """Returns the bytes of weights that a step reads. tokens: tokens of all its sequences together."""
        return self.weight_bytes + self.expert_bytes * float(self.experts.share(sequences, tokens))

    def flops(self, size: StepSize) -> float:
        """Returns the operations of a step."""
        return _rows(size) * (self.flops_per_token + self.flops_per_looked_at * _context(size))

    def seconds(self, accelerator: Accelerator, size: StepSize, *, is_early: bool = False) -> float:
        """Returns the seconds of a step. is_early: whether it was launched during the previous step."""
        device = self.device_seconds(accelerator, size)
        if is_early:
            return max(device, self.following_host.seconds(size) + self._sending)
        return device + self.host.seconds(size) + self._sending

    def device_seconds(self, accelerator: Accelerator, size: StepSize) -> float:
        """Returns the seconds of a pass; without a graph of its size, at least those of kernel launches."""
        rows = _rows(size)
        reading = self.weights_read(size.sequences, rows) * accelerator.read_s
        computing = rows * self.flops_per_token / (ARITHMETIC * accelerator.flops_per_s)
        exchanging = 0.0
        if self.all_reduces:
            byte_s = self.exchange.share * accelerator.exchange_s
            exchanging = self.all_reduces * (self.exchange.latency_s + rows * self.row_bytes * byte_s)
            exchanging += self.exchange.latency_s + size.tokens * self.logit_bytes * accelerator.exchange_s
        attending = self.layers * self._attention(accelerator, size)
        pass_s = max(reading, computing) + attending + exchanging + self.kernels * KERNEL_S
        return pass_s if self._has_graph(size) else max(pass_s, self.kernels * LAUNCH_S)

    def _has_graph(self, size: StepSize) -> bool:
        is_padded = size.prompt_tokens > 0 or size.tokens <= FEW_QUERIES * size.sequences
        return self.has_graphs and is_padded and _rows(size) <= CAPTURED_SIZES[-1]

    def _attention(self, accelerator: Accelerator, size: StepSize) -> float:
        """Returns the seconds of attention in a layer: those of reading the cache, or of computing if longer.

        A program reads the slots of a part in batches, one after another. If there are more parts than
        running programs, it then reads another part.
        """
        if not self.layers:
            return 0.0
        context = _context(size)
        longest = math.ceil(min(context, self._part(context)) / SLOTS)
        batches = size.sequences * self.programs * math.ceil(context / SLOTS)
        turns = math.ceil(batches / (PROGRAMS * accelerator.processors))
        read = self.cache_bytes_per_token * size.context_tokens / self.layers * accelerator.read_s
        looked_at = self.flops_per_looked_at / self.layers * _rows(size) * context
        computed = looked_at / (ATTENTION * accelerator.flops_per_s)
        return max(max(longest, turns) * SLOTS_S, read, computed)

    def _part(self, context: float) -> int:
        """Returns the slots of the last part of a context."""
        if context <= PARTS * SHORTEST:
            return SHORTEST
        return SECOND if context <= PARTS * (SHORTEST + SECOND) else self.third_part

    @property
    def _sending(self) -> float:
        """Seconds to send a step to the other ranks; 0 without other ranks."""
        return SEND_S if self.all_reduces else 0.0


def _rows(size: StepSize) -> float:
    return size.tokens + size.prompt_tokens


def _context(size: StepSize) -> float:
    """Returns the mean context of a sequence, in tokens."""
    return size.context_tokens / size.sequences


def step_costs(model: ModelSkeleton, settings: EngineSettings, *, on_cuda: bool = True) -> StepCosts:
    """Returns the costs of the model on ``settings.tensor_parallel`` devices."""
    devices = settings.tensor_parallel
    layers = model.layers_of(devices)
    weights = model.weight_bytes(devices, settings.quantization, on_cuda=on_cuda)
    of_experts = model.expert_bytes(devices)
    heads = model.query_heads_of(devices)
    row_bytes = model.hidden_size * model.dtype.itemsize
    gathers = devices > 1 and model.modules_in(GATHERED_OUTPUT)
    return StepCosts(
        weight_bytes=weights - model.looked_up_bytes(devices) - of_experts,
        cache_bytes_per_token=block_bytes(settings, layers, model.dtype) / settings.block_size,
        flops_per_token=model.flops_per_token() / devices,
        flops_per_looked_at=_attention_flops(heads, layers),
        kernels=model.layer_kernels() + KERNELS_OF_PASS,
        layers=len(layers),
        programs=max(
            kv_heads if value_dim else -(-heads // LINES_OF_LATENTS)
            for kv_heads, _, value_dim in layers.values()
        ),
        third_part=third_length(model.context_length),
        all_reduces=model.modules_in(SPLIT_INPUTS) if devices > 1 else 0,
        row_bytes=row_bytes,
        following_host=NO_HOST if settings.is_draft and settings.graphs else HOST,
        has_graphs=settings.graphs,
        expert_bytes=of_experts,
        experts=ExpertsRead.independent(model.expert_share),
        logit_bytes=model.vocab_size * model.dtype.itemsize if gathers else 0,
    )


def _attention_flops(query_heads: int, layers: Mapping[int, LayerShape]) -> float:
    """Returns the operations of attention for a pair of tokens, in all heads and layers.

    Each dimension of a key and of a value takes a multiplication and an addition.
    """
    dims = sum(key_dim + (value_dim or key_dim) for _, key_dim, value_dim in layers.values())
    return 2.0 * query_heads * dims
