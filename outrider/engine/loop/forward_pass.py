"""Forward passes of a model over its paged cache; all ranks of a group run the same passes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from outrider.engine.adapters.adapters import Adapters
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.choosing.step_result import StepResult
from outrider.engine.drafters.chain_drafter import verdicts_in
from outrider.engine.drafters.target_drafters import TargetDrafters
from outrider.engine.errors import CacheLostError
from outrider.engine.forward.attention import Paged
from outrider.engine.forward.batch import Batch, adapter_rows, feed_chosen, pack, paged_batch
from outrider.engine.forward.batch_invariant import PASS_TOKENS, Passes, cut, padded_pass
from outrider.engine.forward.chain_batches import ChainBatches
from outrider.engine.forward.decoder import Decoder, decoder_of, layer_operations
from outrider.engine.forward.experts import count_read
from outrider.engine.forward.graphs import (
    CudaCapture,
    GraphBatch,
    Graphs,
    drafting_sizes,
    ranks_of_drafts,
    sizes_of_drafts,
)
from outrider.engine.forward.kernel import Kernel
from outrider.engine.forward.output import ForwardOutput, joined, states_of
from outrider.engine.forward.row_graphs import ByRows, RowGraphs
from outrider.engine.inputs.block_tables import BlockTables, shape_of_tables
from outrider.engine.inputs.choice_input import ChoiceInput
from outrider.engine.inputs.paged_input import PagedInput, PagedLayout, fill
from outrider.engine.inputs.recurrence import begun_uses, recurrences
from outrider.engine.inputs.step_input import NO_ROUNDS, Feed, ForeseenRounds, StepInput
from outrider.engine.inputs.told_tokens import TOLD
from outrider.engine.loading.context import context_length
from outrider.engine.loading.special_tokens import mask_token
from outrider.engine.loading.timings import LoadTimings
from outrider.engine.loop.step_graphs import StepGraphs
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.planning.promise import Promise
from outrider.engine.settings import EngineSettings

if TYPE_CHECKING:
    from outrider.engine.forward.draft_graphs import DraftGraphs


class ForwardPass:
    """Forward passes of a model, or of a rank's share of it, over its paged cache.

    outrider/engine/loop/load.py creates it and sets its cache.
    """

    cache: PagedCache
    tables: BlockTables
    slow_because: tuple[str, ...]  # on a GPU: a sentence for each missing optimization

    def __init__(
        self,
        model: Any,
        settings: EngineSettings,
        kernel: Kernel | None,
        group: RankGroup | None,
        drafters: TargetDrafters,
        promise: Promise,
        load_timings: LoadTimings,
        adapters: Adapters,
    ) -> None:
        """
        Args:
            model: transformers model whose attention calls ours (weights.attach).
            settings: settings with all open values resolved.
            kernel: attention kernel; None: attention gathers blocks.
            group: group of this rank; None: the model is whole.
            drafters: drafters of the target.
            promise: how far the same seed gives the same text.
            load_timings: timings of the load so far.
            adapters: adapters of the target, whose weights may still be loaded.
        """
        self.model, self.settings, self.kernel, self.group = model, settings, kernel, group
        self.drafters, self.promise, self.load_timings = drafters, promise, load_timings
        self.adapters = adapters
        # Read once: transformers searches the weights for these properties at each access.
        self.dtype, self.device = model.dtype, model.device
        self.is_asynchronous = kernel is not None and kernel.is_asynchronous
        self._is_leader = group is None or group.rank == 0  # only rank 0 reads hidden states
        self._hidden_layers = drafters.hidden_layers if self._is_leader else ()
        self._graphs: StepGraphs | None = None
        self.draft_graphs: DraftGraphs | None = None
        self._decoder: Decoder | None = None
        self._experts_read: torch.Tensor | None = None  # int32 [1] experts read by a pass; None: not counted
        self.num_experts = 0  # experts of all layers together; 0: not counted

    def use_cache(self, cache: PagedCache) -> None:
        """Sets the cache of all later passes."""
        self.cache = cache
        sequences, size = self.settings.max_sequences, cache.block_size
        shape = shape_of_tables(sequences, context_length(self.model), cache.capacity, size)
        self.tables = BlockTables(shape, size, cache.spare_block * size, self.device)
        self._chain_batches = ChainBatches(self.tables, self.dtype)

    def step_of(self, feeds: Sequence[Feed], rounds: ForeseenRounds = NO_ROUNDS) -> StepInput:
        """Returns the input of a step with these feeds, and with all pending changes of the cache.

        Raises:
            ValueError: there are too many feeds, or a recurrent state is missing.
        """
        uses = [] if self.cache.states is None else begun_uses(feeds)
        return StepInput.of(self.tables, feeds, self.cache.take_changes(), uses, rounds)

    def prepare(self, step: StepInput, choice: ChoiceInput | None = None) -> Batch | Passes:
        """Applies the step's changes of the cache; returns the step's tensors. Raises CacheLostError.

        choice: input of the choice of tokens, copied with the step and returned as Batch.choice.
        """
        self.change_cache(step)
        if self.settings.batch_invariant:
            parts = cut(step, PASS_TOKENS[self.device.type])
            pairs = zip(parts, [*[None] * (len(parts) - 1), choice], strict=True)
            return Passes([self._graph_of(*part) or self._pass_of(*part) for part in pairs])
        batch = self._graph_of(step, choice) or self.lay_out(step, choice)
        if step.rounds.count:
            batch = replace(batch, rounds=step.rounds)
        if (states := self.cache.states) is None:
            return batch
        order = recurrences(step)
        program = None if not self.is_asynchronous else states.program_of(order)
        return replace(batch, recurrences=order, state_program=program)

    def change_cache(self, step: StepInput) -> None:
        """Applies the step's changes of the cache. Raises CacheLostError."""
        try:
            self.cache.make(step.changes)
        except Exception as error:
            raise CacheLostError(f"tokens could not be moved in the cache: {error!r}") from error

    def _graph_of(self, step: StepInput, choice: ChoiceInput | None) -> GraphBatch | None:
        return None if self._graphs is None else self._graphs.batch(step, choice)

    def _pass_of(self, step: StepInput, choice: ChoiceInput | None) -> Batch:
        """Returns the tensors of a pass with batch-invariant numerics."""
        return self._with_new_blocks(padded_pass(step, self.tables, self.dtype, choice))

    def lay_out(self, step: StepInput, choice: ChoiceInput | None = None) -> Batch:
        """Returns the tensors of a pass over the blocks of this cache, or of a target drafter's cache."""
        batch = self._laid_out(step, choice)
        if self.is_asynchronous:
            return batch
        rows = adapter_rows(step.feeds, self.device)
        return replace(batch, adapters=rows) if rows else batch

    def _laid_out(self, step: StepInput, choice: ChoiceInput | None) -> Batch:
        tables, dtype = self.tables, self.dtype
        if self.kernel is None:
            return pack(step.feeds, tables, dtype)
        if not self.is_asynchronous and (batch := self._chain_batches.of(step)) is not None:
            return batch
        layout = PagedLayout.of(step)
        if self.is_asynchronous:
            layout = layout.with_adapters(len({feed.adapter for feed in step.feeds} - {0}))
        fields = fill(layout, step, tables, choice).sent()
        given = PagedInput.of(fields, tables.on_device)
        rows = None if choice is None else choice.at(fields)
        return self._with_new_blocks(paged_batch(given, given.logit_rows, tables.block_size, dtype, rows))

    def _with_new_blocks(self, batch: Batch) -> Batch:
        """Writes the new blocks of a batch into the block tables on the device; returns the batch."""
        if self.kernel is not None and batch.paged is not None and len(batch.paged.new_blocks):
            self.kernel.take_in(batch.paged)
        return batch

    def run(self, step: Batch | Passes, chosen: torch.Tensor | None = None) -> ForwardOutput:
        """Computes the batch or its passes, and returns their output. chosen: argument of feed_chosen."""
        if isinstance(step, Passes) and len(step.parts) > 1:
            return joined(self._output_of(part, chosen) for part in step.parts)
        return self._output_of(step.parts[0] if isinstance(step, Passes) else step, chosen)

    def _output_of(self, batch: Batch, chosen: torch.Tensor | None) -> ForwardOutput:
        if isinstance(batch, GraphBatch):
            batch.send()
        if chosen is not None:
            feed_chosen(batch.token_ids, chosen)
            if batch.rounds.count:
                self._move_behind_verdicts(batch, chosen)
        return self._output_of_sent(batch)

    def _move_behind_verdicts(self, batch: Batch, chosen: torch.Tensor) -> None:
        """Moves the leading feeds behind their Verdicts, which only the device knows.

        chosen: chosen tokens, led by what the Verdicts tell (see ForeseenRounds).
        """
        from outrider.engine.kernels.rounds_ahead import move_behind_verdicts

        assert batch.paged is not None
        if isinstance(batch, GraphBatch):
            self._with_new_blocks(batch)  # the graph writes them too late for this kernel
        told = chosen[: batch.rounds.count * len(TOLD)]
        moves = move_behind_verdicts(batch.paged, batch.choice, told, self.cache.block_size)
        if batch.rounds.may_branch:
            self.cache.move(*moves)

    def _output_of_sent(self, batch: Batch) -> ForwardOutput:
        if isinstance(batch, GraphBatch):
            return batch.compute()
        return batch.without_padding(self._compute(batch))

    def drafted_after(
        self, feeds: Sequence[Feed], choice: ChoiceInput, result: StepResult[torch.Tensor], positions: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Drafts chains after the Verdicts of a target without waiting; returns None if there is no graph.

        Args:
            feeds: feeds that end with placeholders for the tokens of the Verdicts (see ``read_verdicts``).
            choice: input of the choice of tokens, for the positions that follow if nothing is accepted.
            result: result of the target's choice of tokens, on the device.
            positions: positions of the longest chain.

        Returns:
            ``DraftChains.found``, and the numbers [num_sequences, len(TOLD)] of ``read_verdicts``.
        """
        graphs = self.draft_graphs
        if graphs is None or not graphs.fits(feeds):
            return None
        batch = self.prepare(self.step_of(feeds), choice)
        assert isinstance(batch, Batch)  # a draft never uses batch-invariant numerics
        if isinstance(batch, GraphBatch):
            batch.send()
        ends, told = verdicts_in(batch, result, self.group)
        batch.logit_rows.copy_(ends)
        output = self._output_of_sent(batch)
        # Placeholders after the end of a Verdict are fed as well; their numbers do not matter to the chain.
        finite = torch.ones_like(output.are_finite)
        return graphs.drafted(batch, replace(output, are_finite=finite), positions), told

    def _compute(self, batch: Batch) -> ForwardOutput:
        if self._experts_read is not None:
            self._experts_read.zero_()
        paged = Paged(batch, self.cache, self.kernel)
        logits, states = self._run(paged)
        are_finite = self.are_finite(paged)
        for recurrence in batch.recurrences:
            recurrence.finish()
        return ForwardOutput(logits, states, are_finite, self._experts_read)

    def _run(self, paged: Paged) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.adapters.apply_to(paged.batch.adapters)
        if self._decoder is not None:
            return self._decoder(paged)
        batch = paged.batch
        output = self.model(
            input_ids=batch.token_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            output_hidden_states=self._hidden_layers or False,  # hidden states of other layers are not kept
            outrider=paged,
        )
        return output.logits[0], states_of(output.hidden_states, self._hidden_layers)

    def are_finite(self, paged: Paged) -> torch.Tensor:
        """Returns bool [num_tokens]: whether all keys, values and kept states are finite, at all ranks."""
        are_finite = self.cache.are_finite(paged.batch.slots, paged.windowed_slots)
        for recurrence in paged.batch.recurrences:
            if recurrence.use.ends:  # keys and values show no NaN of recurrent layers at the model's end
                assert self.cache.states is not None
                kept_are_finite = self.cache.states.kept.are_finite([*recurrence.use.ends.values()])
                are_finite[recurrence.rows].logical_and_(kept_are_finite)
        if self.group is not None:
            self.group.agree(are_finite)
        return are_finite

    def pass_over(self, part: Any) -> Callable[[Paged], torch.Tensor]:
        """Returns a function that runs a part of the model and returns logits [num_logits, vocab_size]."""
        decoder = None if self._decoder is None else self._decoder_of(part, ())

        def run(paged: Paged) -> torch.Tensor:
            self.adapters.apply_to(paged.batch.adapters)
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

    def _decoder_of(self, model: Any, hidden_layers: Sequence[int]) -> Decoder | None:
        return decoder_of(model, hidden_layers, layer_operations(self.kernel, self.device, self.dtype))

    def count_experts(self) -> None:
        """Starts to count the experts that each pass reads, if the model has experts and is a target.

        Further positions of a draft return only their tokens to the host.
        """
        if not self.settings.is_draft and (counted := count_read(self.model, self.device)) is not None:
            self._experts_read, self.num_experts = counted

    def use_decoder(self) -> bool:
        """Switches to the fast decoder; returns False if the model has none."""
        self._decoder = self._decoder_of(self.model, self._hidden_layers)
        return self._decoder is not None

    def use_layers(self) -> None:
        """Switches to transformers' layers."""
        self._decoder = None

    def capture_graphs(self) -> tuple[str, ...]:
        """Captures the CUDA graphs of steps and of drafters; returns the reasons why some are missing."""
        settings = self.settings
        if not settings.graphs:
            return ("no step has a CUDA graph: graphs are off in the settings",)
        if self.cache.states is not None:
            return ("no step has a CUDA graph: the model keeps recurrent states",)
        self._capture = CudaCapture()
        self._graphs = StepGraphs(settings, self.device.type, partial(self._graphs_of, self._compute))
        reasons = self._graphs.capture()
        if settings.is_draft and mask_token(self.model.config) is None:
            reasons += self._capture_draft_graphs()
        if self.drafters:
            from outrider.engine.kernels.rounds_ahead import compile_moving

            compile_moving(self.tables.on_device, self.tables.block_size, chooses=self._is_leader)
        return reasons + self.drafters.capture()

    def _capture_draft_graphs(self) -> tuple[str, ...]:
        """Captures the graphs of a Draft's positions; returns the reasons why some are missing."""
        self.draft_graphs = self.draft_graphs_of(self._compute)
        return self.draft_graphs.capture()

    def draft_graphs_of(self, compute: Callable[[Batch], ForwardOutput]) -> "DraftGraphs":
        """Returns graphs of a Draft's positions. compute: runs the forward pass of one position."""
        from outrider.engine.forward.draft_graphs import DraftGraphs

        return DraftGraphs(
            compute,
            self._capture,
            self.tables,
            self.dtype,
            sizes=sizes_of_drafts(self.settings),
            ranks=min(ranks_of_drafts(self.settings), self.model.config.get_text_config().vocab_size),
            group=self.group,
        )

    def graphs_of(self, compute: Callable[[Batch], ForwardOutput]) -> Graphs:
        """Returns graphs for passes of a target drafter."""
        return self._graphs_of(compute, drafting_sizes(self.settings), as_chains=False)

    def row_graphs_of(self, functions: Sequence[ByRows], size: int) -> list[RowGraphs]:
        """Returns graphs for a target drafter's functions of rows."""
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
        adapters: int = 0,
        beside: Graphs | None = None,
    ) -> Graphs:
        def computed(batch: Batch) -> ForwardOutput:
            return compute(self._with_new_blocks(batch))

        return Graphs(
            computed,
            self._capture,
            self.tables,
            self.dtype,
            sequences=self.settings.max_sequences,
            sizes=sizes,
            group=self.group,
            as_chains=as_chains,
            logits=logits,
            adapters=adapters,
            beside=beside,
        )
