"""Self-speculation: the target's first layers, or all but some layers, draft with the target's norm and head.

The drafting layers write keys and values to the target's own cache, at the slots after the committed tokens.
The verification pass overwrites these slots, so no rollback is needed.

All ranks of a tensor-parallel target run these layers together, each with its share.

Source: Elhoushi et al., "LayerSkip: enabling early exit inference and self-speculative decoding", 2024, and
for layers left out, Xia et al., "SWIFT: on-the-fly self-speculative decoding", 2024.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.choosing.step_result import StepResult
from outrider.engine.drafters.chain_drafter import (
    ChainDrafter,
    choice_of,
    verdict_feed,
    verdicts_in,
)
from outrider.engine.drafters.drafts_under_way import ChainsUnderWay
from outrider.engine.drafters.exit_search import ExitSearch, candidates, costs
from outrider.engine.drafters.target_drafter import Judging, Target, feed_of
from outrider.engine.drafters.trained_exits import TrainedExits
from outrider.engine.drafters.trees import Trees, with_room
from outrider.engine.drafters.trial import trial
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.attention import Paged
from outrider.engine.forward.batch import Batch
from outrider.engine.forward.graphs import Graphs
from outrider.engine.forward.output import ForwardOutput
from outrider.engine.forward.part import part_of
from outrider.engine.inputs.choice_input import ChoiceInput
from outrider.engine.inputs.step_input import NOTHING_FED, Feed, StepInput
from outrider.engine.loading.head_checkpoint import TargetShape
from outrider.engine.loading.kinds import has_states
from outrider.engine.loading.text_part import served_config
from outrider.engine.parallel.drafter_step import DrafterStep
from outrider.engine.parallel.rank_group import together
from outrider.engine.sequence import EngineSequence
from outrider.engine.settings import EngineSettings

if TYPE_CHECKING:
    from outrider.engine.forward.draft_graphs import DraftGraphs

logger = logging.getLogger(__name__)

TRIAL_SHARE = 0.05  # largest share of time that trials and captures may take
LONGEST_STEP_S = 1.0  # seconds; a longer pause between two steps is idle time


class EarlyExit(ChainDrafter):
    """Drafter of trees of any depth: all nodes of a position share a pass."""

    def __init__(self, settings: EngineSettings, name: str) -> None:
        super().__init__(settings, name)
        self._settings = settings
        self._own = own = settings.drafters[name]
        self._target_shape = TargetShape.of(settings)
        if has_states(served_config(settings.model)):
            raise self._refusal("its layers keep recurrent states, which only the target's own passes keep")
        self._exits = None if own.checkpoint is None else TrainedExits(settings, name)
        self.weight_bytes = 0 if self._exits is None else self._exits.checkpoint.weight_bytes
        self.candidates = self._named() or candidates(self._target_shape.num_layers)
        self._layers: tuple[int, ...] | None = None  # layers that draft; None: not known yet
        self._search: ExitSearch | None = None
        self._parts: dict[tuple[int, ...], Callable[[Paged], Tensor]] = {}  # passes by their layers
        # Captured once the layers that draft are known.
        self._graphs: Graphs | None = None
        self._chains: DraftGraphs | None = None
        self._spent = self._watched = 0.0  # seconds of trials and captures, and of all steps
        self._seen: float | None = None  # time when ``watch`` last ended

    def load(self, target: Target) -> None:
        self._target = target
        self._parts = {
            layers: target.pass_over(self._part(target.model, layers)) for layers in self.candidates
        }
        if len(self.candidates) == 1:
            (self._layers,) = self.candidates
        else:
            self._search = ExitSearch(costs(self._settings, self.candidates))

    def capture(self) -> tuple[str, ...]:
        """Captures graphs. While a search is under way it captures nothing: ``watch`` does that later."""
        from outrider.engine.kernels.verdict import compile_reading

        def compute(batch: Batch) -> ForwardOutput:
            return self._compute(self._layers or (), batch)

        self._graphs, self._chains = self._target.graphs_of(compute), self._target.draft_graphs_of(compute)
        compile_reading(self._target.device)
        self.makes_chains = True
        return () if self._search else (*self._graphs.capture(), *self._chains.capture())

    def graph_bytes(self, rows: int, feeds: int, chains: int) -> int:
        """Returns the bytes of logits, and of a flag for each row: whether it is finite."""
        target = self._target_shape
        return feeds + chains + rows * target.vocab_size * target.dtype.itemsize + rows

    def _limited(self, request: DraftRequest) -> DraftRequest:
        if self._layers is None:
            return replace(request, depth=0)
        return with_room(request, self._target.cache)

    def _begin(self, requests: Sequence[DraftRequest]) -> ChainsUnderWay | None:
        feeds = [_first_feed(request) for request in requests]
        if self._layers is None or self._chains is None or not self._chains.fits(feeds):
            return None
        positions = tuple(request.depth for request in requests)
        fed = StepInput.of(self._target.tables, feeds, self._target.cache.take_changes())
        with self._together(self._layers, fed, positions):
            return ChainsUnderWay.of(self._chained(self._layers, fed, choice_of(requests), max(positions)))

    def _grown(self, requests: Sequence[DraftRequest]) -> Trees:
        """Makes Drafts with a pass through the drafting layers for each position."""
        trees = Trees(requests)
        feeds = [_first_feed(requests[index]) for index in trees.growing]
        while feeds:
            trees.grow(*self._pass(self._layers or (), feeds))
            feeds = trees.feeds(between=1, num_logits=1)
        return trees

    def clear(self, sequence: EngineSequence) -> None:
        self._target.cache.clear(sequence, sequence.cached)

    def _taken(self, judging: Sequence[Judging]) -> list[Judging]:
        """Returns the sequences with cache for chains, if these may begin before the host knows Verdicts.

        Chains may not begin early if feeding an accepted token again could change its cached keys and values.
        First layers change them within rounding, which batch-invariant numerics do not allow. A part that
        skips a layer computes other keys and values.
        """
        layers = self._layers or ()
        if self._settings.batch_invariant or layers != tuple(range(len(layers))):
            return []
        return [
            part
            for part in judging
            if self._target.cache.reserve(
                part.request.engine_sequence, part.start + part.num_tokens + part.request.depth
            )
        ]

    def _begin_after(
        self, judging: Sequence[Judging], result: StepResult[Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Launches chains, each of which begins with the last token of a Verdict."""
        feeds = [*map(verdict_feed, judging)]
        if self._chains is None or not self._chains.fits(feeds):
            return None
        from_verdicts = [replace(part.request, depth=1 + part.request.depth) for part in judging]
        positions, fed = (
            tuple(request.depth for request in from_verdicts),
            StepInput.of(self._target.tables, feeds),
        )
        with self._together(self._layers or (), fed, positions, reads_verdicts=True):
            return self._after_verdicts(fed, choice_of(from_verdicts), result, max(positions))

    def _after_verdicts(
        self, fed: StepInput, choice: ChoiceInput, result: StepResult[Tensor] | None, positions: int
    ) -> tuple[Tensor, Tensor]:
        """Launches this rank's part of chains after Verdicts. Returns as ``_begin_after``."""
        assert self._chains is not None
        batch = self._target.lay_out(fed, choice)
        ends, told = verdicts_in(batch, result, self._target.group)
        tokens = told[:, : self._chains.ranks]  # column 0: last tokens; the rest fills up to ``ranks``
        return self._chains.after(batch.choosing_at(ends), tokens, positions)[1:], told

    def follow(self, step: DrafterStep) -> None:
        """Runs this rank's part of a step; if the step feeds nothing, captures the next graph."""
        layers = self.candidates[step.part]
        if step.reads_verdicts:
            choice = ChoiceInput.without_choice(step.positions)
            self._after_verdicts(step.fed, choice, None, max(step.positions))
        elif step.positions:
            self._chained(layers, step.fed, ChoiceInput.without_choice(step.positions), max(step.positions))
        elif step.fed.feeds:
            self._run(layers, step.fed)
        else:
            self._capture_next(layers)

    def watch(self, sequences: Sequence[EngineSequence]) -> None:
        """Runs a trial of the next candidate while the search goes on, within TRIAL_SHARE of the time.

        After the search it captures the graphs of the layers found, a graph per call.
        """
        if self._search is None and not self._uncaptured:
            return
        started = time.perf_counter()
        if self._seen is not None:
            self._watched += min(started - self._seen, LONGEST_STEP_S)
        self._seen = started
        if self._spent <= TRIAL_SHARE * self._watched:
            self._go_on(sequences)
            self._seen = time.perf_counter()
            self._spent += self._seen - started

    def _go_on(self, sequences: Sequence[EngineSequence]) -> None:
        """Runs a trial, or captures a graph."""
        if self._search is not None:
            self._try(self._search, sequences)
        elif self._uncaptured and (layers := self._layers) is not None:
            graphs = self._uncaptured[0]
            with self._together(layers):
                self._capture_next(layers)
            if graphs.is_complete and graphs.slow_because:
                logger.error("%s: drafting is slower than it could be: %s", self, graphs.slow_because)

    def _try(self, search: ExitSearch, sequences: Sequence[EngineSequence]) -> None:
        layers = search.next
        judged = trial(sequences, self._target.cache, lambda feeds: self._pass(layers, feeds))
        if judged is None:
            return
        search.observe(layers, judged)
        if not search.is_over:
            return
        self._layers, self._search = search.best, None
        self._parts = {layers: part for layers, part in self._parts.items() if layers == self._layers}
        if self._layers is None:
            self._graphs = self._chains = None
            self.no_drafts_because = f"none of {len(self.candidates)} parts of the target would pay: {search}"
            logger.warning("%s: %s. Decoding is plain from now on.", self, self.no_drafts_because)
        else:
            logger.info("%s: layers %s draft from now on: %s", self, [*self._layers], search)

    def _pass(self, layers: tuple[int, ...], feeds: list[Feed]) -> tuple[Tensor, Tensor]:
        """Runs a pass of these layers at all ranks.

        Returns:
            logits [num_logits, vocab_size], and bool [num_tokens]: whether a token's numbers are finite.
        """
        changes = self._target.cache.take_changes()  # a Verdict's moves must precede reads of the cache
        fed = StepInput.of(self._target.tables, feeds, changes)
        with self._together(layers, fed):
            _, computed = self._run(layers, fed)
        return computed.logits, computed.are_finite

    def _together(
        self,
        layers: tuple[int, ...],
        fed: StepInput = NOTHING_FED,
        positions: tuple[int, ...] = (),
        *,
        reads_verdicts: bool = False,
    ) -> AbstractContextManager[None]:
        """Sends a step to the other ranks, which ``follow`` it while rank 0 runs its own part."""
        part = self.candidates.index(layers)
        step = DrafterStep(fed, 0, part, True, self.number, positions, reads_verdicts)
        return together(self._target.group, self._target.tables, step)

    def _chained(
        self, layers: tuple[int, ...], fed: StepInput, choice: ChoiceInput, positions: int
    ) -> Tensor:
        """Launches this rank's part of chains, without waiting for it; returns ``DraftChains.found``."""
        assert self._chains is not None
        return self._chains.drafted(*self._run(layers, fed, choice), positions)

    def _run(
        self, layers: tuple[int, ...], fed: StepInput, choice: ChoiceInput | None = None
    ) -> tuple[Batch, ForwardOutput]:
        """Runs this rank's part of a pass. choice: input of the choice of tokens, sent with the batch."""
        self._target.change_cache(fed)
        graph = None if self._graphs is None else self._graphs.batch(fed, choice)
        if graph is not None:
            graph.send()
            return graph, graph.compute()
        batch = self._target.lay_out(fed, choice)
        return batch, self._compute(layers, batch)

    @property
    def _uncaptured(self) -> "list[Graphs | DraftGraphs]":
        """Graphs with sizes that are not captured yet."""
        return [
            graphs for graphs in (self._graphs, self._chains) if graphs is not None and not graphs.is_complete
        ]

    def _capture_next(self, layers: tuple[int, ...]) -> None:
        self._layers = layers
        self._uncaptured[0].capture_next()

    def _compute(self, layers: tuple[int, ...], batch: Batch) -> ForwardOutput:
        target = self._target
        paged = Paged(batch, target.cache, target.kernel)
        return ForwardOutput(self._parts[layers](paged), None, target.are_finite(paged))

    def _part(self, model: Any, layers: tuple[int, ...]) -> Any:
        return part_of(model, layers, self._exits.load(len(layers), model) if self._exits else None)

    def _named(self) -> list[tuple[int, ...]]:
        """Returns the candidates that settings or trained exits name; empty: the search finds the layers."""
        count, skipped, leaves_after = (
            self._target_shape.num_layers,
            self._own.skipped_layers,
            self._own.layers,
        )
        if leaves_after != "auto":
            if leaves_after >= count:
                raise self._refusal(f"layers={leaves_after} must be 1 to {count - 1}: it has {count} layers")
            if self._exits is not None and leaves_after not in self._exits.numbers:
                raise self._exits.checkpoint.refusal(
                    f"it has no exit for layers={leaves_after}: there are {self._exits.numbers}"
                )
            return [tuple(range(leaves_after))]
        if not skipped:
            return [tuple(range(number)) for number in self._exits.numbers] if self._exits else []
        if self._exits is not None:
            raise self._exits.checkpoint.refusal(f"skipped_layers={[*skipped]} have no exits: give layers")
        if max(skipped) >= count or len({*skipped}) >= count:
            raise self._refusal(f"skipped_layers={[*skipped]} must be some of 0 to {count - 1}, and not all")
        return [tuple(layer for layer in range(count) if layer not in skipped)]

    def _refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self} for model={self._target_shape.name!r}: {reason}")


def _first_feed(request: DraftRequest) -> Feed:
    """Returns the feed of the newest token, after which the first token of a Draft is chosen."""
    sequence = request.engine_sequence
    return feed_of(sequence, sequence.tokens[-1:], sequence.cached, num_logits=1)
