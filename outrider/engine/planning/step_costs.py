"""Costs of a model's step: what it reads, computes, exchanges and launches, and what it costs the host."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from outrider.engine.cache.paged_cache import LayerShape
from outrider.engine.forward.graphs import CAPTURED_SIZES
from outrider.engine.forward.kernel import PROGRAMS
from outrider.engine.inputs.context_parts import PARTS, SECOND, SHORTEST, third_length
from outrider.engine.inputs.paged_input import FEW_QUERIES
from outrider.engine.planning.accelerators import ARITHMETIC, ATTENTION, Accelerator
from outrider.engine.planning.memory import block_bytes
from outrider.engine.planning.skeleton import ModelSkeleton
from outrider.engine.settings import EngineSettings
from outrider.pace.experts import NO_EXPERTS, ExpertsRead
from outrider.pace.step import StepSize

KERNEL_S = 1.67e-6  # seconds of a small kernel in a graph: H100, thirty a layer were 1.6 ms of the 8B's step
LAUNCH_S = 50e-6  # seconds of the host to launch a kernel without a graph: H100, steps without graphs
SLOTS, SLOTS_S = 128, 1.75e-6  # slots that attention reads at a time, and seconds for that: an estimate
KERNELS_OF_PASS = 32  # kernels beside the layers': embedding, rotation, logits, checks of the cache, choice
SPLIT_INPUTS = ("rowwise", "rowwise_rep", "embedding_rowwise")  # styles after which devices add up outputs
GATHERED_OUTPUT = ("colwise_gather_output",)  # style of an output projection whose logits rank 0 gathers


@dataclass(frozen=True)
class HostCosts:
    """Seconds of the host for a step, without waiting for the device."""

    step_s: float
    sequence_s: float
    row_s: float  # each token that is decoded or verified

    def seconds(self, size: StepSize) -> float:
        return self.step_s + self.sequence_s * size.sequences + self.row_s * size.tokens


@dataclass(frozen=True)
class ExchangeCosts:
    """Cost of a sum over the ranks of one machine."""

    latency_s: float
    share: float = 1.0  # seconds of a byte, in those of NCCL


# Steps on an H200 took 0.6 ms, 2.3 us a sequence and 1.8 us a token longer than their part on the device,
# without scheduling and handing out of tokens (bench/results/on_device.json). These are estimated: 0.2 ms and
# as much again for each sequence.
HOST = HostCosts(0.8e-3, 5e-6, 1.8e-6)
# The positions of a Draft are replays that nothing on the host waits for.
NO_HOST = HostCosts(0.0, 0.0, 0.0)
# NCCL in a graph takes 10 to 13 us for 16 KB over NVLink, an estimate.
NCCL = ExchangeCosts(12e-6)
# Seconds in which the ranks of a node hear of a step: 0.03 ms of rank 0 on a CPU, and the others wake up.
SEND_S = 0.05e-3


@dataclass(frozen=True)
class StepCosts:
    """Costs of a step on each of the devices that share a model.

    What a step takes depends on how the engine goes on from one step to the next. In rounds the device waits
    for the host. Plain decoding launches a step before the host knows the tokens of the step before, so the
    longer of host and device counts. A Draft's positions after the first are the device's alone.
    """

    weight_bytes: int  # read once a step, whatever it computes
    cache_bytes_per_token: float  # read for each token of context, once a step and sequence
    flops_per_token: float  # operations of products with weights
    flops_per_looked_at: float  # operations of attention, for each pair of a token and a token before it
    kernels: int  # kernels of a pass
    layers: int = 0  # layers with attention
    programs: int = 1  # programs of attention for a sequence's part of its context
    third_part: int = SHORTEST  # slots of a part far into a context
    all_reduces: int = 0
    row_bytes: int = 0  # bytes of a token in each of them
    logit_bytes: int = 0  # bytes of a token's logits that rank 0 gathers
    exchange: ExchangeCosts = NCCL
    host: HostCosts = HOST
    following_host: HostCosts = HOST  # host's part of a step that is launched early
    has_graphs: bool = True
    expert_bytes: int = 0  # bytes of experts, of which a step reads those that its tokens chose
    experts: ExpertsRead = NO_EXPERTS  # share of them, by the size of a step

    def weights_read(self, sequences: float, tokens: float) -> float:
        """Returns the bytes of weights that a step reads, of that many tokens all together."""
        return self.weight_bytes + self.expert_bytes * float(self.experts.share(sequences, tokens))

    def flops(self, size: StepSize) -> float:
        """Returns the operations of a step."""
        return _rows(size) * (self.flops_per_token + self.flops_per_looked_at * _context(size))

    def seconds(self, accelerator: Accelerator, size: StepSize, *, is_early: bool = False) -> float:
        """Returns the seconds of a step. is_early: it was launched during the step before."""
        device = self.device_seconds(accelerator, size)
        if is_early:
            return max(device, self.following_host.seconds(size) + self._sending)
        return device + self.host.seconds(size) + self._sending

    def device_seconds(self, accelerator: Accelerator, size: StepSize) -> float:
        """Returns the seconds of a pass, or of launching its kernels if no graph has its size."""
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
        """Returns the seconds of a layer: reading the cache, by as many programs as work on it, or computing.

        A program reads a part's slots one batch after the other, and then another part's if there are more
        parts than programs.
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
        """Seconds in which the other ranks, if there are any, are told of a step."""
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
    heads = -(-model.query_heads // devices)
    row_bytes = model.hidden_size * model.dtype.itemsize
    gathers = devices > 1 and model.modules_in(GATHERED_OUTPUT)
    return StepCosts(
        weight_bytes=weights - model.looked_up_bytes(devices) - of_experts,
        cache_bytes_per_token=block_bytes(settings, layers, model.dtype) / settings.block_size,
        flops_per_token=model.flops_per_token() / devices,
        flops_per_looked_at=_attention_flops(heads, layers),
        kernels=model.layer_kernels() + KERNELS_OF_PASS,
        layers=len(layers),
        programs=max(kv_heads for kv_heads, _, _ in layers.values()),
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
    """Returns a product and a sum for each dimension of a key, and of a value, in all heads and layers."""
    dims = sum(key_dim + (value_dim or key_dim) for _, key_dim, value_dim in layers.values())
    return 2.0 * query_heads * dims
