"""Memory plan of an engine, made before any weight is read."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from outrider.engine.cache.key_values import LayerShape
from outrider.engine.cache.narrow import type_of_cache
from outrider.engine.cache.recurrent_states import states_bytes, tree_bytes
from outrider.engine.choosing.sampler import ADJUSTED_AT_ONCE
from outrider.engine.errors import CacheTooSmallError
from outrider.engine.forward.batch_invariant import PASS_TOKENS
from outrider.engine.forward.graphs import (
    captured_sizes,
    chunk_logits,
    chunk_sizes,
    draft_bytes,
    drafting_sizes,
    feed_bytes,
    layout_of,
)
from outrider.engine.forward.kernel import why_no_cpu_kernel, why_no_gpu_kernel
from outrider.engine.inputs.block_tables import shape_of_tables
from outrider.engine.inputs.choice_input import bytes_to_choose
from outrider.engine.inputs.context_parts import parts_of, third_length
from outrider.engine.inputs.paged_input import FEW_TILE, split_tiles_of
from outrider.engine.inputs.step_buffer import Field
from outrider.engine.loading.weights import resolve_device, resolve_prefill_chunk
from outrider.engine.planning.memory import block_bytes, blocks_in, pool_bytes, pools_of
from outrider.engine.planning.skeleton import ModelSkeleton
from outrider.engine.settings import EngineSettings
from outrider.pace.settings import MAX_DEPTH

# Bytes per logit to choose a token, and to rank several: noise, and float32 copies that settings change.
CHOICE_BYTES, RANKING_BYTES = 16, 24
PART_BYTES = 4  # size of a float32, the type in which attention's partial results are combined
RUNTIME_BYTES = {"cpu": 2**29, "cuda": 2**30}  # torch, Ray, the CUDA context
# Limits of the default cache. On a CPU it takes at most this share of the machine's memory, and at most
# half of its engine's share. On a GPU it leaves this share to fragmentation, NCCL and unplanned needs.
MOST_OF_MACHINE, MARGIN_ON_CUDA = 0.2, 0.05


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each device of one engine.

    ``activations`` covers the largest step with all its logits, and hidden states that wait for drafters.
    """

    model: str
    parameters: int  # number in the whole model
    vocab_size: int
    dtype: torch.dtype
    context_length: int  # tokens of the longest sequence
    weights: int
    num_blocks: int
    windowed_blocks: int  # blocks of the pool for windowed layers; 0: there is no such pool
    window_blocks: int  # blocks that a sequence holds of that pool, at most
    block_size: int  # tokens
    block: int  # bytes, in all layers
    cache: int  # blocks of all pools, and recurrent states of as many sequences as a step may have
    activations: int
    graphs: int
    runtime: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations + self.graphs + self.runtime

    def sequences(self, context: int) -> int:
        """Sequences that the cache holds at a time, each of ``context`` tokens."""
        blocks = -(-context // self.block_size)
        held = self.num_blocks // blocks
        if self.windowed_blocks:
            held = min(held, self.windowed_blocks // min(blocks, self.window_blocks))
        return held


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Returns the largest number from 1 to ``most`` that fits; 0: none. All smaller numbers must fit."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


def resolve_cache(
    model: ModelSkeleton, settings: EngineSettings, memory: int, depth: int = MAX_DEPTH
) -> EngineSettings:
    """Returns the settings with ``cache_memory`` in bytes if it was None. Arguments as for ``plan_memory``.

    Raises:
        CacheTooSmallError: the model leaves no room for a cache.
    """
    if settings.cache_memory is not None:
        return settings
    cache = default_cache(model, settings, memory, depth)
    if cache == 0:
        states = model.states_of(settings.tensor_parallel)
        of_states = states_bytes(states, model.dtype, settings.max_sequences)
        fewer = f", or max_sequences below {settings.max_sequences}, whose states take {of_states}"
        raise CacheTooSmallError(
            f"model={model.name!r} leaves no room for a cache in {settings.device_share:g} of a device with "
            f"{memory} bytes: a larger share or device would{fewer if of_states else ''}"
        )
    return settings.model_copy(update={"cache_memory": cache})


def default_cache(model: ModelSkeleton, settings: EngineSettings, memory: int, depth: int = MAX_DEPTH) -> int:
    """Returns the default cache size: bytes of whole blocks; 0: no block fits.

    Arguments as for ``plan_memory``.
    """
    block = block_bytes(settings, model.layers_of(settings.tensor_parallel), model.dtype)
    room = int(settings.device_share * memory)

    def fits(blocks: int) -> bool:
        planned = settings.model_copy(update={"cache_memory": blocks * block})
        return plan_memory(model, planned, memory, depth).total <= room

    if resolve_device(settings.device).type == "cuda":
        room = int(room * (1 - MARGIN_ON_CUDA))
        return block * largest(fits, room // block)
    needed = settings.max_sequences * -(-model.context_length // settings.block_size)
    most = min(needed, min(int(MOST_OF_MACHINE * memory), room // 2) // block)
    # A model that exceeds its share of a machine may still run there, if other processes leave memory.
    return block * (largest(fits, most) or most)


def plan_memory(
    model: ModelSkeleton,
    settings: EngineSettings,
    memory: int,
    depth: int = MAX_DEPTH,
) -> MemoryPlan:
    """Returns the plan of each device: what rank 0 needs, the only rank that chooses tokens.

    Activations are counted as on a single device, which is an upper bound.

    Args:
        settings: ``cache_memory`` may be left open.
        memory: bytes of each device, of which ``settings.cache_memory`` may be a share.
        depth: depth of the Drafts that the engine verifies; 0 for an engine that only drafts.

    Raises:
        CacheTooSmallError: not one block fits into ``settings.cache_memory``.
    """
    settings = resolve_cache(model, settings, memory, depth)
    on_cuda = resolve_device(settings.device).type == "cuda"
    layers = model.layers_of(settings.tensor_parallel)
    windowed, context = model.windowed, model.context_length
    in_all_layers = blocks_in(memory, settings, layers, model.dtype)
    pools = pools_of(in_all_layers, settings, layers, windowed, model.dtype, context)
    num_blocks, block = pools.num_blocks, block_bytes(settings, layers, model.dtype)
    states = model.states_of(settings.tensor_parallel)
    of_states = states_bytes(states, model.dtype, settings.max_sequences)
    num_logits = settings.max_sequences * (1 + depth)
    activations = model.activation_bytes(resolve_prefill_chunk(settings) + num_logits, num_logits)
    activations += tree_bytes(states)
    activations += model.waiting_bytes() + (0 if on_cuda else model.widened_bytes())
    of_torch = min(num_logits, ADJUSTED_AT_ONCE) if on_cuda else num_logits
    activations += of_torch * model.vocab_size * (CHOICE_BYTES if depth else RANKING_BYTES)
    graphs = 0
    if on_cuda:
        size = settings.block_size
        tables = shape_of_tables(settings.max_sequences, model.context_length, num_blocks * size, size)
        parts = _part_bytes(model, settings, tables[1] * size)
        activations += parts + bytes_to_choose(num_logits, model.vocab_size) + Field(tables, "int32").size
        if pools.num_windowed:
            activations += Field((num_blocks + 1,), "int32").size
        if settings.graphs:
            graphs = _graph_bytes(model, settings, parts)
    if _are_gathered(layers, model.dtype, settings):
        longest = min(num_blocks * settings.block_size, settings.max_sequences * model.context_length)
        activations += _gather_bytes(layers, longest, model.dtype)
    return MemoryPlan(
        model=model.name,
        parameters=model.parameters,
        vocab_size=model.vocab_size,
        dtype=model.dtype,
        context_length=model.context_length,
        weights=model.weight_bytes(settings.tensor_parallel, settings.quantization, on_cuda=on_cuda),
        num_blocks=num_blocks,
        windowed_blocks=pools.num_windowed,
        window_blocks=0 if windowed is None else windowed.blocks_of_sequence(settings.block_size),
        block_size=settings.block_size,
        block=block,
        cache=pool_bytes(pools, settings, layers, windowed, model.dtype) + block + of_states,  # padding too
        activations=activations,
        graphs=graphs,
        runtime=RUNTIME_BYTES["cuda" if on_cuda else "cpu"],
    )


def _part_bytes(model: ModelSkeleton, settings: EngineSettings, slots: int) -> int:
    """Returns the bytes of attention's partial results for the parts of a step's contexts.

    slots: slots of the longest context for which the block tables have room.
    """
    parts = parts_of(slots, third_length(model.context_length))
    heads, layers = model.query_heads_of(settings.tensor_parallel), model.layers_of(settings.tensor_parallel)
    # A latent is smaller than the key of which it is a part, by the rotated numbers.
    of_tiles = max(
        split_tiles_of(heads, caches_latents=not value_dim) * ((value_dim or key_dim) + 2)
        for _, key_dim, value_dim in layers.values()
    )
    return FEW_TILE * parts * heads * of_tiles * PART_BYTES


def _graph_bytes(model: ModelSkeleton, settings: EngineSettings, parts: int) -> int:
    """Returns the bytes of the CUDA graphs of passes, including passes of a target drafter.

    Each graph keeps its input and its output. Graphs share all other memory, as only one runs at a time.

    parts: bytes of attention's partial results.
    """
    sequences = settings.max_sequences

    def kept(rows: int, *, as_chains: bool = False, logits: int | None = None) -> int:
        adapters = settings.most_adapters
        layout = layout_of(rows, sequences, as_chains=as_chains, logits=logits, adapters=adapters)
        given = layout.logits * model.vocab_size * model.dtype.itemsize + rows  # logits, and a flag per row
        return feed_bytes(layout) + model.state_bytes(rows) + given

    rows = PASS_TOKENS["cuda"] if settings.batch_invariant else captured_sizes(settings)[-1]
    total = kept(rows, as_chains=settings.batch_invariant)
    computing = model.activation_bytes(rows, rows)
    sizes, logits = chunk_sizes(settings, resolve_prefill_chunk(settings)), chunk_logits(settings)
    if sizes and not settings.batch_invariant:
        rows = sizes[-1]
        total += kept(rows, logits=logits)
        computing = max(computing, model.activation_bytes(rows, min(rows, logits)))
    chains = draft_bytes(settings)
    if settings.is_draft:
        total += chains
    of_drafts = drafting_sizes(settings)[-1]
    layout = layout_of(of_drafts, sequences, as_chains=False)
    if drafting := model.drafting_graph_bytes(of_drafts, feed_bytes(layout), chains):
        total += drafting
        computing = max(computing, model.activation_bytes(of_drafts, of_drafts))
    return total + computing + parts


def _are_gathered(layers: Mapping[int, LayerShape], dtype: torch.dtype, settings: EngineSettings) -> bool:
    """Whether attention gathers the blocks of the cache."""
    if resolve_device(settings.device).type == "cuda":
        return why_no_gpu_kernel(layers) is not None
    # Copies are needed to widen narrow blocks, or to separate values that are a part of their keys.
    if type_of_cache(settings, dtype) != dtype or not all(value_dim for *_, value_dim in layers.values()):
        return True
    if dtype == torch.bfloat16 and not settings.batch_invariant:
        return True
    return why_no_cpu_kernel(layers, dtype) is not None


def _gather_bytes(layers: Mapping[int, LayerShape], num_tokens: int, dtype: torch.dtype) -> int:
    """Returns the bytes into which a layer's cache is gathered; GatherSpace takes twice the size."""
    keys = max(heads * key_dim for heads, key_dim, _ in layers.values())
    values = max(heads * (value_dim or key_dim) for heads, key_dim, value_dim in layers.values())
    return 2 * num_tokens * (keys + values) * dtype.itemsize
