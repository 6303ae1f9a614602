"""Heads that draft token by token: each pass feeds the drafted token with the head's own last state.

The cache slot of a position holds what the head computes from the target's states there and the next token.
Drafted tokens take the slots after the committed tokens. Once they are accepted, their slots are written
again, from the target's states.
"""

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from outrider.engine.choosing.draft_request import DraftedSequence, DraftRequest
from outrider.engine.choosing.step_result import StepResult
from outrider.engine.drafters.caching_drafter import CachingDrafter
from outrider.engine.drafters.chain_drafter import choice_of, verdicts_in
from outrider.engine.drafters.drafts_under_way import ChainsUnderWay
from outrider.engine.drafters.shared_head import SharedHead
from outrider.engine.drafters.target_drafter import CommittedStates, Judging, feed_of, rows_at
from outrider.engine.drafters.trees import Trees, with_room
from outrider.engine.forward.attention import Paged
from outrider.engine.forward.batch import Batch
from outrider.engine.forward.graphs import GraphBatch, Graphs
from outrider.engine.forward.output import ForwardOutput
from outrider.engine.forward.row_graphs import ByRows
from outrider.engine.inputs.choice_input import ChoiceInput
from outrider.engine.inputs.paged_input import FEW_QUERIES
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.parallel.drafter_step import DrafterStep
from outrider.engine.sequence import UNKNOWN
from outrider.engine.settings import EngineSettings


class AutoregressiveHead(CachingDrafter, SharedHead):
    """Head with trees of any depth: all nodes of a position share a pass."""

    is_fed_back = True  # whether its guesses are fed back to it, with its own states

    def __init__(self, settings: EngineSettings, name: str) -> None:
        super().__init__(settings, name)
        self._graphs: Graphs | None = None
        self._project: ByRows = self._logits
        # State at the last token in the target's cache, for each sequence that wants a Draft: the head's
        # output state, or its input state if guesses are not fed back.
        self._newest: dict[DraftedSequence, Tensor] = {}

    def capture(self) -> tuple[str, ...]:
        from outrider.engine.kernels.verdict import compile_reading

        [of_logits] = self._target.row_graphs_of([self._logits], self.state_size)
        self._states = of_logits.taken  # static buffer, which passes use for their states too
        self._project = of_logits
        self._graphs = self._target.graphs_of(self._captured)
        if not self.is_fed_back:
            return *self._graphs.capture(), *of_logits.capture()
        self._chains = self._target.draft_graphs_of(self._position)
        compile_reading(self._target.device)
        self.makes_chains = True
        return *self._graphs.capture(), *of_logits.capture(), *self._chains.capture()

    def graph_bytes(self, rows: int, feeds: int, chains: int) -> int:
        """Returns the bytes of the input and output states of a pass, and of logits."""
        target = self._target_shape
        numbers = rows * (2 * self.state_size + target.vocab_size)
        return feeds + chains + numbers * target.dtype.itemsize + rows  # 1 byte per row: whether it is finite

    def take_in(self, committed: Sequence[CommittedStates]) -> None:
        """Feeds the states that may no longer be buffered: the next Draft attends to all earlier tokens."""
        committed = self._waiting.add(committed)
        if not committed:
            return
        feeds = []
        for part in committed:
            first, sequence = part.start + 1, part.sequence
            tokens = sequence.tokens[first : first + len(part.hidden)]
            feeds.append(feed_of(sequence, tokens, part.start))
        before = self._states_before(committed)
        step = DrafterStep(StepInput.of(self._target.tables, feeds), len(before), wants_logits=False)
        states, _ = self._on_all_ranks(step, before)
        wanted = states if self.is_fed_back else before
        last = rows_at(wanted, [end - 1 for end in accumulate(len(part.hidden) for part in committed)])
        pairs = zip(committed, last, strict=True)
        self._newest = {part.sequence: state for part, state in pairs if part.is_wanted}

    def _limited(self, request: DraftRequest) -> DraftRequest:
        return with_room(request, self._target.cache, unwritten=1)

    def _begin(self, requests: Sequence[DraftRequest]) -> ChainsUnderWay | None:
        # The last token that the head has cached: the first token of the chain is chosen from its state.
        sequences = [request.engine_sequence for request in requests]
        feeds = [feed_of(sequence, [UNKNOWN], sequence.cached - 1, 1) for sequence in sequences]
        if not self._chains.fits(feeds):
            return None
        states = torch.stack([self._newest[request.sequence] for request in requests])
        positions = tuple(request.depth for request in requests)
        fed = StepInput.of(self._target.tables, feeds)
        step = DrafterStep(fed, len(states), positions=positions)
        with self._together(step, states):
            return ChainsUnderWay.of(self._chained(step, states, choice_of(requests)))

    def _chained(self, step: DrafterStep, states: Tensor, choice: ChoiceInput) -> Tensor:
        batch = self._target.lay_out(step.fed, choice)
        return self._chains_after(batch, states, max(step.positions))

    def _chains_after(self, batch: Batch, states: Tensor, positions: int) -> Tensor:
        """Launches chains, with a pass for each position but the last; returns ``DraftChains.found``.

        Args:
            batch: argument of ``DraftGraphs.begin``.
            states: [num_sequences, state_size] output states of the last token of each sequence.
        """
        self._states[: len(states)].copy_(states)
        finite = torch.ones(batch.num_tokens, dtype=torch.bool, device=states.device)
        output = ForwardOutput(self._project(states), None, finite)
        return self._chains.drafted(batch, output, positions)

    def _grown(self, requests: Sequence[DraftRequest]) -> Trees:
        """Makes Drafts with a pass for each position but the last."""
        trees = Trees(requests)
        if trees.growing:
            states = torch.stack([self._newest[requests[index].sequence] for index in trees.growing])
            _, logits = self._on_all_ranks(DrafterStep(num_states=len(states)), states)
            while going_on := trees.grow(logits):
                fed = StepInput.of(self._target.tables, trees.feeds())
                step = DrafterStep(fed, len(going_on))
                states, logits = self._on_all_ranks(step, rows_at(states, going_on))
        return trees

    def _taken(self, judging: Sequence[Judging]) -> list[Judging]:
        return [*filter(self._takes, judging)]

    def _takes(self, judging: Judging) -> bool:
        count, depth = judging.num_tokens, judging.request.depth
        fed, end = self._waiting.count(judging.committed) + count, judging.start + count - 1
        return fed <= FEW_QUERIES and self._target.cache.reserve(judging.request.engine_sequence, end + depth)

    def _begin_after(
        self, judging: Sequence[Judging], result: StepResult[Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Begins chains in a pass that also processes the tokens of the step."""
        feeds = [_feed_after(part, part.start - self._waiting.count(part.committed)) for part in judging]
        if not self._chains.fits(feeds):
            return None
        before = self._states_before(self._waiting.add([part.committed for part in judging]))
        requests = [part.request for part in judging]
        positions = tuple(request.depth for request in requests)
        fed = StepInput.of(self._target.tables, feeds)
        step = DrafterStep(fed, len(before), positions=positions, reads_verdicts=True)
        with self._together(step, before):
            return self._after_verdicts(step, before, choice_of(requests, (UNKNOWN,)), result)

    def _after_verdicts(
        self, step: DrafterStep, states: Tensor, choice: ChoiceInput, result: StepResult[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        batch = self._laid_out(step.fed, choice)
        ends, told = verdicts_in(batch, result, self._target.group)
        after = self._computed(batch, states)
        return self._chains_after(batch.choosing_at(ends), after[ends], max(step.positions)), told

    def forget(self, sequence: DraftedSequence) -> None:
        super().forget(sequence)
        self._newest.pop(sequence, None)

    def _compute(self, step: DrafterStep, states: Tensor) -> tuple[Tensor, Tensor]:
        if step.fed.feeds:
            states = self._pass(step.fed, states)
        logits = self._project(states) if step.wants_logits else states.new_empty(0, 0)
        return states, logits

    def _laid_out(self, step: StepInput, choice: ChoiceInput | None = None) -> Batch:
        """Sends the input of a pass to the device. choice: input of the choice of tokens, sent along."""
        graph = None if self._graphs is None else self._graphs.batch(step, choice)
        if graph is None:
            return self._target.lay_out(step, choice)
        graph.send()
        return graph

    def _pass(self, step: StepInput, states: Tensor) -> Tensor:
        """Returns the output states of the fed tokens from their input states: [num_tokens, state_size]."""
        return self._computed(self._laid_out(step), states)

    def _computed(self, batch: Batch, states: Tensor) -> Tensor:
        """Does what ``_pass`` does, for a batch whose input is on the device already."""
        if not isinstance(batch, GraphBatch):
            return self._after(batch, states)
        self._states[: len(states)].copy_(states)
        after = batch.compute().hidden
        assert after is not None
        return after[:, 0]

    def _captured(self, batch: Batch) -> ForwardOutput:
        """Computes what a graph captures: states without logits, which only some of these rows need."""
        after = self._after(batch, self._states[: batch.num_tokens])
        finite = torch.ones(len(after), dtype=torch.bool, device=after.device)
        return ForwardOutput(after[:, :0], after[:, None], finite)

    def _position(self, batch: Batch) -> ForwardOutput:
        """Computes a position of chains. Its output states become the input states of the next position."""
        states = self._states[: batch.num_tokens]
        states.copy_(self._after(batch, states))
        finite = torch.ones(len(states), dtype=torch.bool, device=states.device)
        return ForwardOutput(self._logits(states), None, finite)

    def _after(self, batch: Batch, states: Tensor) -> Tensor:
        after = self._forward(states, Paged(batch, self._cache, self._target.kernel))
        return after.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    @abstractmethod
    def _forward(self, states: Tensor, paged: Paged) -> Tensor:
        """Returns the output states of a batch from its input states: [num_tokens, state_size]."""

    @abstractmethod
    def _logits(self, states: Tensor) -> Tensor:
        """Returns at rank 0 logits [num_rows, vocab_size] of the next tokens, from [num_rows, state_size]."""


def _feed_after(judging: Judging, start: int) -> Feed:
    """Returns the feed of a sequence from position ``start`` on, up to a Verdict that the device knows.

    The Verdict's tokens are placeholders, which ``read_verdicts`` replaces.
    """
    sequence = judging.request.engine_sequence
    tokens = [*sequence.tokens[start + 1 :], *judging.told_tokens]
    return feed_of(sequence, tokens, start, num_logits=1)
