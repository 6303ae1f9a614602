"""A model over its paged cache, and its forward pass, which is alike at all ranks of a group."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from outrider.decoding.outcomes import RANKS
from outrider.engine.cache.paged_cache import LayerShape, PagedCache
from outrider.engine.drafters.target_drafters import TargetDrafters
from outrider.engine.errors import CacheLostError, UnsupportedModelError
from outrider.engine.forward.attention import Paged, Probe
from outrider.engine.forward.batch import Batch, feed_chosen, pack, paged_batch
from outrider.engine.forward.batch_invariant import (
    PASS_TOKENS,
    Passes,
    cut,
    padded_pass,
    why_rows_mix,
)
from outrider.engine.forward.chain_batches import ChainBatches
from outrider.engine.forward.decoder import Decoder, decoder_of, layer_operations
from outrider.engine.forward.graphs import (
    ByRows,
    CudaCapture,
    GraphBatch,
    Graphs,
    RowGraphs,
    captured_sizes,
    chunk_logits,
    chunk_sizes,
    drafting_sizes,
    sizes_of_drafts,
)
from outrider.engine.forward.kernel import Kernel, find_kernel
from outrider.engine.forward.linear import join_projections, optimize_for_cpu
from outrider.engine.forward.output import ForwardOutput, joined, states_of
from outrider.engine.inputs.choice_input import ChoiceInput
from outrider.engine.inputs.paged_input import FEW_QUERIES, PagedLayout, fill
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.kernels.cache_folder import use_writable_cache_folder
from outrider.engine.loading.context import context_because, context_length
from outrider.engine.loading.quantized_checkpoint import is_quantized
from outrider.engine.loading.self_check.check import SelfCheck
from outrider.engine.loading.self_check.script import blocks_needed
from outrider.engine.loading.special_tokens import mask_token
from outrider.engine.loading.timings import LoadTimings
from outrider.engine.loading.weights import attach, load_model, resolve_device, resolve_prefill_chunk
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.planning.device_room import DeviceRoom
from outrider.engine.planning.memory import block_bytes, blocks_in, empty_cache
from outrider.engine.planning.memory_plan import resolve_cache
from outrider.engine.planning.promise import first_promise
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.settings import EngineSettings

if TYPE_CHECKING:
    from outrider.engine.forward.draft_graphs import DraftGraphs

logger = logging.getLogger(__name__)


class ForwardPass:
    """The model, or a rank's shard of it, with the keys and values that it computes."""

    def __init__(
        self,
        settings: EngineSettings,
        group: RankGroup | None = None,
        drafters: TargetDrafters | None = None,
    ) -> None:
        """
        Args:
            group: group of this process, if ``settings.tensor_parallel`` is above 1; all its ranks build at
                once.
            drafters: drafters of the target, loaded with it at all ranks; None: it has none.

        Raises:
            UnsupportedModelError: the checkpoint cannot run here, with the reason.
            CacheTooSmallError: the memory budget buys no block.
            DeviceTooSmallError: the weights or the cache do not fit into the device.
        """
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self.load_timings = LoadTimings()
        room = DeviceRoom.of(resolve_device(settings.device), settings.device_share)
        if room.device.type == "cuda":
            use_writable_cache_folder()
        with self.load_timings.timed("weights"):
            with room.for_weights(settings):
                self.model = load_model(settings)
            layers = attach(self.model, settings.model)
        if because := context_because(self.model):
            logger.info("model=%r: %s", settings.model, because)
        self.drafters = drafters = drafters or TargetDrafters()
        shapes = layers.shapes | drafters.numbered_shapes
        # transformers walks through the weights to find these, so a step does not ask it.
        self.dtype, self.device = dtype, device = self.model.dtype, self.model.device
        found = {
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(device),
            "threads": torch.get_num_threads(),
            "prefill_chunk": resolve_prefill_chunk(settings),
        }
        self.settings = settings = settings.model_copy(update=found)
        is_stored_so = is_quantized(self.model.config)
        context = context_length(self.model)
        kernel = find_kernel(shapes, dtype, device, block_size=settings.block_size, context_length=context)
        why_refused = why_rows_mix(self.model) or (kernel if isinstance(kernel, str) else None)
        if settings.batch_invariant and why_refused is not None:
            raise UnsupportedModelError(f"batch_invariant=True with model={settings.model!r}: {why_refused}")
        self.promise = first_promise(
            settings,
            str(dtype).removeprefix("torch."),
            is_quantized=settings.quantization is not None or is_stored_so,
            why_refused=why_refused,
        )
        self.group = group
        self._is_leader = group is None or group.rank == 0  # states are read there alone
        self._hidden_layers = drafters.hidden_layers if self._is_leader else ()
        self._graphs: Graphs | None = None
        self._chunk_graphs: Graphs | None = None  # graphs for steps that take prompts along
        self.draft_graphs: DraftGraphs | None = None
        self._decoder: Decoder | None = None
        is_slower = device.type == "cpu" and dtype == torch.bfloat16  # if a sequence feeds several tokens
        self.kernel: Kernel | None = None
        if not isinstance(kernel, str) and (settings.batch_invariant or not is_slower):
            self.kernel = kernel
        self.slow_because: tuple[str, ...] = ()  # on a GPU: a sentence for each thing that could be faster
        if isinstance(kernel, str) and device.type == "cuda":
            self.slow_because = (f"attention gathers its blocks, and no step has a CUDA graph: {kernel}",)
        self.is_asynchronous = self.kernel is not None and self.kernel.is_asynchronous
        self._chain_batches = ChainBatches(settings.block_size, dtype)
        self._check_and_optimize(layers)
        empty_cache(device)  # joined weights and checks leave pieces that are too small for the cache
        with self.load_timings.timed("weights"):
            drafters.load(self)
        with self.load_timings.timed("cache"):
            if settings.cache_memory is None:
                settings = resolve_cache(skeleton(settings), settings, room.plannable)
            num_blocks = blocks_in(room.memory, settings, shapes, dtype)
            room.check_cache(settings, num_blocks * block_bytes(settings, shapes, dtype))
            if group is not None:
                num_blocks = group.least(num_blocks)
            self.cache = self._cache_of(layers.shapes, num_blocks)
            drafters.allocate(num_blocks)
        self.settings = settings  # settings in force: nothing is left open
        if self.is_asynchronous:
            with self.load_timings.timed("graphs"):
                self._compile_kernels()
                self.slow_because += self._capture_graphs()
                if self._graphs is not None:
                    self.slow_because += drafters.capture()
        for reason in self.slow_because:
            logger.error("steps are slower than they could be on %s: %s", device, reason)

    def _capture_graphs(self) -> tuple[str, ...]:
        """Captures the graphs of steps; returns why graphs are missing."""
        settings = self.settings
        if not settings.graphs:
            return ("no step has a CUDA graph: graphs are off in the settings",)
        self._capture = CudaCapture()
        sizes = (PASS_TOKENS[self.device.type],) if settings.batch_invariant else captured_sizes(settings)
        self._graphs = self._graphs_of(self._compute, sizes, as_chains=settings.batch_invariant)
        reasons = self._graphs.capture()
        sizes, logits = chunk_sizes(settings, resolve_prefill_chunk(settings)), chunk_logits(settings)
        if sizes and not settings.batch_invariant:
            self._chunk_graphs = self._graphs_of(self._compute, sizes, as_chains=False, logits=logits)
            reasons += self._chunk_graphs.capture()
        if settings.is_draft and mask_token(self.model.config) is None:
            reasons += self._capture_draft_graphs()
        return reasons

    def _capture_draft_graphs(self) -> tuple[str, ...]:
        """Captures the positions of Drafts; returns why some are missing."""
        from outrider.engine.forward.draft_graphs import DraftGraphs

        self.draft_graphs = DraftGraphs(
            self._compute,
            self._capture,
            self.cache,
            self.dtype,
            self.device,
            blocks=self._most_blocks,
            sizes=sizes_of_drafts(self.settings),
            ranks=min(RANKS, self.model.config.get_text_config().vocab_size),
        )
        return self.draft_graphs.capture()

    def graphs_of(self, compute: Callable[[Batch], ForwardOutput]) -> Graphs:
        """Returns graphs for passes of the target drafter."""
        return self._graphs_of(compute, drafting_sizes(self.settings), as_chains=False)

    def row_graphs_of(self, functions: Sequence[ByRows], size: int) -> list[RowGraphs]:
        """Returns graphs for functions of rows of the target drafter."""
        model, sizes = self.model, drafting_sizes(self.settings)
        # Other ranks choose no tokens, so they keep no logits.
        kept = model.config.get_text_config().vocab_size if self._is_leader else 0
        states, logits = (
            torch.zeros(sizes[-1], width, dtype=self.dtype, device=self.device) for width in (size, kept)
        )
        return [
            RowGraphs(function, self._capture, states, logits, sizes, self.group) for function in functions
        ]

    def _graphs_of(
        self,
        compute: Callable[[Batch], ForwardOutput],
        sizes: Sequence[int],
        *,
        as_chains: bool,
        logits: int | None = None,
    ) -> Graphs:
        return Graphs(
            compute,
            self._capture,
            self.cache,
            self.dtype,
            self.device,
            sequences=self.settings.max_sequences,
            blocks=self._most_blocks,
            sizes=sizes,
            group=self.group,
            as_chains=as_chains,
            logits=logits,
        )

    @property
    def _most_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return self.cache.blocks_for(min(context_length(self.model), self.cache.capacity))

    @torch.inference_mode()
    def _compile_kernels(self) -> None:
        """Runs a prompt and a single token of no sequence, so that no request waits for a compiler."""
        blocks = np.full(min(FEW_QUERIES + 1, context_length(self.model)), self.cache.spare_block)
        feeds = [Feed([0] * count, 1, 0, blocks, None) for count in (len(blocks), 1)]
        self.run(self.prepare(StepInput.of(feeds)))

    def _cache_of(self, shapes: Mapping[int, LayerShape], num_blocks: int) -> PagedCache:
        return PagedCache(shapes, num_blocks, self.settings.block_size, self.dtype, self.device)

    def _check_and_optimize(self, layers: Probe) -> None:
        """Checks the model with a cache of its own, before there is much else in memory."""
        settings, device = self.settings, self.device
        limit = context_length(self.model)
        check = SelfCheck(self.model, layers.modules, settings.block_size, limit, self.group)
        if settings.self_check:
            with self.load_timings.timed("self_check"):
                self.cache = self._cache_of(layers.shapes, blocks_needed(settings.block_size))
                check.check(settings.model, self._logits)
        with self.load_timings.timed("weights"):
            if device.type == "cpu":
                optimize_for_cpu(self.model)
            else:
                join_projections(self.model)
            self._decoder = self._decoder_of(self.model, self._hidden_layers)
        if self._decoder is not None and (difference := check.differs(self._logits)):
            logger.error("steps are slower than they could be: the fast decoder is not used: %s", difference)
            self._decoder = None

    def _decoder_of(self, model: Any, hidden_layers: Sequence[int]) -> Decoder | None:
        return decoder_of(model, hidden_layers, layer_operations(self.kernel, self.device, self.dtype))

    def _logits(self, step: StepInput) -> torch.Tensor:
        return self.run(self.prepare(step)).logits

    def prepare(self, step: StepInput, choice: ChoiceInput | None = None) -> Batch | Passes:
        """Makes the step's changes of the cache; returns its tensors. Raises CacheLostError.

        choice: input of the choice of tokens, to be copied with the step; comes back as Batch.choice.
        """
        self.change_cache(step)
        if self.settings.batch_invariant:
            parts = cut(step.feeds, PASS_TOKENS[self.device.type])
            pairs = zip(parts, [*[None] * (len(parts) - 1), choice], strict=True)
            return Passes([self._graph_of(*part) or self._pass_of(*part) for part in pairs])
        return self._graph_of(step.feeds, choice) or self.lay_out(step.feeds, choice)

    def change_cache(self, step: StepInput) -> None:
        """Makes the step's changes of the cache. Raises CacheLostError."""
        try:
            self.cache.make(step.moves, step.cleared)
        except Exception as error:
            raise CacheLostError(f"tokens could not be moved in the cache: {error!r}") from error

    def _graph_of(self, feeds: Sequence[Feed], choice: ChoiceInput | None) -> GraphBatch | None:
        for graphs in (self._graphs, self._chunk_graphs):
            if graphs is not None and (batch := graphs.batch(feeds, choice)) is not None:
                return batch
        return None

    def _pass_of(self, feeds: Sequence[Feed], choice: ChoiceInput | None) -> Batch:
        """Returns a pass of batch-invariant numerics."""
        block_size, dtype, device = self.settings.block_size, self.dtype, self.device
        return padded_pass(feeds, block_size, dtype, device, self._spare_slot, choice)

    def lay_out(self, feeds: Sequence[Feed], choice: ChoiceInput | None = None) -> Batch:
        """Returns the tensors of a pass over the blocks of this cache, or of a target drafter's cache."""
        block_size, dtype, device = self.settings.block_size, self.dtype, self.device
        if self.kernel is None:
            return pack(feeds, block_size, dtype, device)
        if not self.is_asynchronous and (batch := self._chain_batches.of(feeds)) is not None:
            return batch
        layout = PagedLayout.of(feeds, block_size)
        fields = fill(layout, feeds, block_size, self._spare_slot, choice, device=device).sent()
        return paged_batch(fields, fields["logit_rows"], block_size, dtype, choice)

    def run(self, step: Batch | Passes, chosen: torch.Tensor | None = None) -> ForwardOutput:
        """Computes the batch or its passes, and returns their output. chosen: argument of feed_chosen."""
        if isinstance(step, Passes) and len(step.parts) > 1:
            return joined(self._output_of(part, chosen) for part in step.parts)
        return self._output_of(step.parts[0] if isinstance(step, Passes) else step, chosen)

    def _output_of(self, batch: Batch, chosen: torch.Tensor | None) -> ForwardOutput:
        if isinstance(batch, GraphBatch):
            return batch.compute(chosen)
        if chosen is not None:
            feed_chosen(batch.token_ids, chosen)
        return batch.without_padding(self._compute(batch))

    @property
    def _spare_slot(self) -> int:
        """Slot of no sequence, for padding to write to."""
        return self.cache.spare_block * self.settings.block_size

    def _compute(self, batch: Batch) -> ForwardOutput:
        logits, states = self._run(Paged(batch, self.cache, self.kernel))
        return ForwardOutput(logits, states, self.are_finite(batch))

    def are_finite(self, batch: Batch) -> torch.Tensor:
        """Returns bool [num_tokens]: whether all keys and values are finite, at all ranks."""
        are_finite = self.cache.are_finite(batch.slots)
        if self.group is not None:
            self.group.agree(are_finite)
        return are_finite

    def pass_over(self, part: Any) -> Callable[[Paged], torch.Tensor]:
        """Returns the pass of a part of the model to logits [num_logits, vocab_size]."""
        decoder = None if self._decoder is None else self._decoder_of(part, ())

        def run(paged: Paged) -> torch.Tensor:
            if decoder is not None:
                return decoder(paged)[0]
            batch = paged.batch
            logits: torch.Tensor = part(
                input_ids=batch.token_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.logit_rows,
                outrider=paged,
            ).logits[0]
            return logits

        return run

    def _run(self, paged: Paged) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._decoder is not None:
            return self._decoder(paged)
        batch = paged.batch
        output = self.model(
            input_ids=batch.token_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            output_hidden_states=self._hidden_layers or False,  # states of other layers are not kept
            outrider=paged,
        )
        return output.logits[0], states_of(output.hidden_states, self._hidden_layers)
