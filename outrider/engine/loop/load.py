"""Loads a forward pass: weights, self-check, cache and graphs, in the order in which they take memory."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.adapters.adapters import Adapters
from outrider.engine.cache.key_values import LayerShape
from outrider.engine.cache.narrow import NARROW, type_of_cache
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.cache.recurrent_states import RecurrentStates, states_bytes
from outrider.engine.cache.windowed_blocks import WindowedBlocks, WindowedLayers
from outrider.engine.drafters.target_drafters import TargetDrafters
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.attention import Probe
from outrider.engine.forward.batch_invariant import PASS_TOKENS, why_rows_mix
from outrider.engine.forward.decoder import layer_operations
from outrider.engine.forward.experts import replace_experts
from outrider.engine.forward.kernel import Kernel, find_kernel
from outrider.engine.forward.linear import StoredLinear, join_projections, optimize_for_cpu
from outrider.engine.forward.mixture_block import use_mixture_blocks
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.held_state import HeldState
from outrider.engine.inputs.paged_input import FEW_QUERIES
from outrider.engine.inputs.step_input import Feed
from outrider.engine.kernels.cache_folder import use_writable_cache_folder
from outrider.engine.loading.cache_scales import cache_scales
from outrider.engine.loading.context import context_because, context_length
from outrider.engine.loading.self_check.check import SelfCheck
from outrider.engine.loading.self_check.script import TEXTS, blocks_needed
from outrider.engine.loading.stored_checkpoint import is_quantized
from outrider.engine.loading.timings import LoadTimings
from outrider.engine.loading.weights import attach, load_model, resolve_device, resolve_prefill_chunk
from outrider.engine.loop.forward_pass import ForwardPass
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.parallel.sums import Sum, add_up, add_up_in_order
from outrider.engine.planning.device_room import DeviceRoom, resolve_draft_ahead
from outrider.engine.planning.memory import Pools, block_bytes, blocks_in, empty_cache, pools_of
from outrider.engine.planning.memory_plan import resolve_cache
from outrider.engine.planning.promise import Promise, first_promise
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.settings import EngineSettings

logger = logging.getLogger(__name__)


def load_forward_pass(
    settings: EngineSettings, group: RankGroup | None = None, drafters: TargetDrafters | None = None
) -> ForwardPass:
    """Loads a checkpoint, or this rank's share of it, and returns its forward pass.

    Args:
        group: group of this process, if ``settings.tensor_parallel`` is above 1; all its ranks load together.
        drafters: drafters of the target, loaded with it at all ranks; None: it has none.

    Raises:
        UnsupportedModelError: the checkpoint cannot run here, with the reason.
        CacheTooSmallError: the memory budget is smaller than one block.
        DeviceTooSmallError: the weights or the cache do not fit into the device.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    drafters, timings = drafters or TargetDrafters(), LoadTimings()
    adapters = Adapters(
        settings.adapters, settings.tensor_parallel, settings.adapter_folder, settings.max_adapter_rank
    )
    room = DeviceRoom.of(resolve_device(settings.device), settings.device_share)
    if room.device.type == "cuda":
        use_writable_cache_folder()
    with timings.timed("weights"):
        with room.for_weights(settings):
            model = load_model(settings)
        layers = attach(model, settings.model)
    if because := context_because(model):
        logger.info("model=%r: %s", settings.model, because)
    shapes = layers.shapes | drafters.numbered_shapes
    kernel, why_none = _kernel_of(settings, model, shapes)
    promise = _promise_of(settings, model, why_none)
    with timings.timed("cache"):
        settings = _in_force(settings, model, room)
    forward = ForwardPass(model, settings, kernel, group, drafters, promise, timings, adapters)
    _check_and_optimize(forward, layers)
    empty_cache(room.device)  # joining and checking leave freed pieces, each too small for the cache
    with timings.timed("weights"):
        drafters.load(forward)
    with timings.timed("cache"):
        num_blocks = blocks_in(room.memory, settings, shapes, model.dtype)
        of_states = states_bytes(layers.states, model.dtype, settings.max_sequences)
        room.check_cache(settings, num_blocks * block_bytes(settings, shapes, model.dtype) + of_states)
        if group is not None:
            num_blocks = group.least(num_blocks)
        context = context_length(model)
        windowed = WindowedLayers.of(layers.windows, context)
        pools = pools_of(num_blocks, settings, shapes, windowed, model.dtype, context)
        cache_dtype = type_of_cache(settings, forward.dtype)
        forward.use_cache(_cache_of(forward, layers, pools, settings.max_sequences, cache_dtype))
        drafters.allocate(pools.num_blocks)
    forward.slow_because = _why_slow(forward, why_none)
    return forward


def _kernel_of(
    settings: EngineSettings, model: Any, shapes: Mapping[int, LayerShape]
) -> tuple[Kernel | None, str | None]:
    """Returns the attention kernel, or None and the reason why the device has none for these shapes."""
    found = find_kernel(
        shapes,
        model.dtype,
        model.device,
        block_size=settings.block_size,
        context_length=context_length(model),
    )
    if isinstance(found, str):
        return None, found
    # On a CPU the kernel is slower than gathering if a sequence feeds several tokens in bfloat16.
    is_slower = model.device.type == "cpu" and model.dtype == torch.bfloat16
    return (found if settings.batch_invariant or not is_slower else None), None


def _promise_of(settings: EngineSettings, model: Any, why_no_kernel: str | None) -> Promise:
    """Returns how far the same seed gives the same text.

    Raises:
        UnsupportedModelError: batch-invariant numerics are refused.
    """
    why_refused = why_rows_mix(model) or why_no_kernel
    if settings.batch_invariant and why_refused is not None:
        raise UnsupportedModelError(f"batch_invariant=True with model={settings.model!r}: {why_refused}")
    return first_promise(
        settings,
        _name_of(model.dtype),
        is_quantized=settings.quantization is not None or is_quantized(model.config),
        why_refused=why_refused,
    )


def _in_force(settings: EngineSettings, model: Any, room: DeviceRoom) -> EngineSettings:
    """Returns the settings with all open values resolved. Raises CacheTooSmallError."""
    found = {
        "dtype": _name_of(model.dtype),
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "prefill_chunk": resolve_prefill_chunk(settings),
        "draft_ahead": resolve_draft_ahead(settings, model.device),
    }
    settings = settings.model_copy(update=found)
    if settings.cache_memory is None:
        settings = resolve_cache(skeleton(settings), settings, room.plannable)
    return settings


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_and_optimize(forward: ForwardPass, layers: Probe) -> None:
    """Checks the model over a small temporary cache, then replaces its layers by faster layers.

    Raises:
        UnsupportedModelError: the model does not compute what transformers computes.
    """
    model, settings, timings = forward.model, forward.settings, forward.load_timings
    limit = context_length(model)
    check = SelfCheck(model, layers.modules, settings.block_size, limit, forward.group)

    def logits(feeds: Sequence[Feed]) -> Tensor:
        return forward.run(forward.prepare(forward.step_of(feeds))).logits

    if settings.self_check:
        with timings.timed("self_check"):
            # This cache is never narrow: rounding to 8 bit would hide other differences.
            blocks = blocks_needed(settings.block_size)
            forward.use_cache(_cache_of(forward, layers, Pools(blocks, blocks), TEXTS, forward.dtype))
            check.check(settings.model, logits)
    with timings.timed("weights"):
        operations = layer_operations(forward.kernel, forward.device, forward.dtype)
        add, rows = _sum_of(settings, has_states=bool(layers.states)), _rows_of_experts(settings)
        are_joined = forward.is_asynchronous and forward.device.type != "cpu"
        are_ours = replace_experts(model, operations, add, rows, are_joined=are_joined)
        if settings.batch_invariant and not are_ours:
            raise UnsupportedModelError(
                f"batch_invariant=True with model={settings.model!r}: a kernel takes experts whose widths"
                " are multiples of 16, and these are not"
            )
        use_mixture_blocks(model, operations)
        forward.count_experts()
        if forward.device.type == "cpu":
            optimize_for_cpu(model)
        else:
            join_projections(model, nn.Linear, StoredLinear)
        rank = 0 if forward.group is None else forward.group.rank
        forward.adapters.load(model, rank, settings.most_adapters if forward.is_asynchronous else 0)
    if forward.use_decoder() and (difference := check.differs(logits)):
        logger.error("steps are slower than they could be: the fast decoder is not used: %s", difference)
        forward.use_layers()
        if difference := check.differs(logits):
            raise UnsupportedModelError(
                f"model={settings.model!r}: packed, it differs from transformers: {difference}"
            )


def _sum_of(settings: EngineSettings, *, has_states: bool) -> Sum | None:
    """Returns the function that sums the ranks' outputs of experts; None: there is a single rank."""
    if settings.tensor_parallel == 1:
        return None
    return add_up_in_order if settings.batch_invariant or has_states else add_up


def _rows_of_experts(settings: EngineSettings) -> int:
    """Returns the number of rows that an expert computes at a time, which affects rounding in bfloat16."""
    is_exact = settings.dtype == "float32" or not settings.batch_invariant
    return 1 if is_exact else PASS_TOKENS["cpu"]


def _cache_of(
    forward: ForwardPass, layers: Probe, pools: Pools, sequences: int, dtype: torch.dtype
) -> PagedCache:
    """Returns an empty cache. dtype: type of the cached numbers."""
    settings, device = forward.settings, forward.device
    (num_blocks, num_windowed), size = pools, settings.block_size
    scales = cache_scales(settings.model) if dtype == NARROW else {}
    states = RecurrentStates(layers.states, sequences, forward.dtype, device) if layers.states else None
    windowed, windows = WindowedLayers.of(layers.windows, context_length(forward.model)), None
    if windowed is not None and num_windowed:
        windows = WindowedBlocks(windowed, num_windowed, size, num_blocks, device)
    return PagedCache(layers.shapes, num_blocks, size, dtype, device, scales, states, windows)


def _why_slow(forward: ForwardPass, why_no_kernel: str | None) -> tuple[str, ...]:
    """Compiles kernels and captures graphs on a GPU; returns a sentence for each missing optimization."""
    reasons: tuple[str, ...] = ()
    if why_no_kernel is not None and forward.device.type == "cuda":
        reasons = (f"attention gathers its blocks, and no step has a CUDA graph: {why_no_kernel}",)
    if forward.is_asynchronous:
        with forward.load_timings.timed("graphs"):
            _compile_kernels(forward)
            reasons += forward.capture_graphs()
    for reason in reasons:
        logger.error("steps are slower than they could be on %s: %s", forward.device, reason)
    return reasons


@torch.inference_mode()
def _compile_kernels(forward: ForwardPass) -> None:
    """Runs a dummy prompt and a dummy token, so that no request waits for kernels to be compiled."""
    count = min(FEW_QUERIES + 1, context_length(forward.model))
    blocks = HeldBlocks([forward.cache.spare_block] * forward.cache.blocks_for(count))
    feeds = [Feed([0] * tokens, 1, 0, blocks, None, state=HeldState(0)) for tokens in (count, 1)]
    forward.run(forward.prepare(forward.step_of(feeds)))
    blocks.drop(0)
