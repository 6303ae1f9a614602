"""Target drafters whose chains are drafted entirely on the device: the host waits once, whatever the depth.

The host chooses the tokens of all other Drafts, position by position: trees, Drafts with distributions, and
Drafts whose choice of tokens depends on a grammar or on the text so far.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.outcomes import Branch
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.choosing.step_result import StepResult
from outrider.engine.device_time import mark
from outrider.engine.drafters.drafts_under_way import ChainsUnderWay, DraftRead, DraftsUnderWay
from outrider.engine.drafters.target_drafter import Judging, Target, TargetDrafter, feed_of
from outrider.engine.drafters.trees import Trees
from outrider.engine.forward.batch import Batch
from outrider.engine.inputs.choice_input import ChoiceInput
from outrider.engine.inputs.paged_input import FEW_QUERIES
from outrider.engine.inputs.step_input import Feed
from outrider.engine.inputs.told_tokens import TOLD
from outrider.engine.parallel.rank_group import RankGroup


class ForeseeingDrafter(TargetDrafter):
    """Drafter whose device may begin chains before the host knows the Verdicts that they follow."""

    _target: Target
    has_alternatives = False  # whether its chains have alternatives, and may follow a Draft with alternatives

    def is_of_host(self, request: DraftRequest) -> bool:
        return self.makes_chains and not self._is_chosen_by_device(request)

    def _is_chosen_by_device(self, request: DraftRequest) -> bool:
        return is_chosen_by_device(replace(request, alternatives=0) if self.has_alternatives else request)

    def begin_drafts(self, judging: Sequence[Judging], result: StepResult[Tensor]) -> DraftsUnderWay | None:
        if not self.makes_chains:
            return None
        judging = [
            part
            for part in judging
            if len(part.rows) <= FEW_QUERIES
            and (self.has_alternatives or part.draft.is_chain)
            and self._is_chosen_by_device(part.request)
        ]
        judging = self._taken(judging)
        started, begun = mark(self._target.device), self._begin_after(judging, result) if judging else None
        if begun is None:
            return None
        found, told = begun
        numbers = torch.cat([told.flatten(), found.flatten()])
        arriving = numbers.to("cpu", non_blocking=True)  # in pinned memory
        requests = [part.request for part in judging]
        branches = [self.branches(request) if request.alternatives else () for request in requests]
        ended = mark(self._target.device)
        return DraftsUnderWay(requests, branches, found.shape, numbers, arriving, started, ended)

    def branches(self, request: DraftRequest) -> Sequence[Branch]:
        """Returns the alternatives of a chain that the device drafts."""
        return ()

    @abstractmethod
    def _taken(self, judging: Sequence[Judging]) -> list[Judging]:
        """Returns the sequences whose chains may begin before the Verdict, and have cache for any Verdict."""

    @abstractmethod
    def _begin_after(
        self, judging: Sequence[Judging], result: StepResult[Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Begins chains after the Verdicts that the device has found; returns None if there is no graph.

        Returns:
            ``DraftChains.found``, and int32 [num_sequences, len(TOLD)] from ``read_verdicts``.
        """


class ChainDrafter(ForeseeingDrafter):
    """Drafter whose device makes chains, and whose host chooses the tokens of all other Drafts."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        requests = [*map(self._limited, requests)]
        made: dict[int, DraftRead] = {}  # key: index of the request
        may_be_chains = [self.makes_chains and is_chosen_by_device(request) for request in requests]
        chained = [place for place, may_be_chain in enumerate(may_be_chains) if may_be_chain]
        of_device = [requests[place] for place in chained]
        begun = self._begin(of_device) if of_device else None
        left = [place for place in range(len(requests)) if begun is None or place not in chained]
        if left:
            of_host = self._grown([requests[place] for place in left])
            invalid = {*of_host.invalid}
            found = zip(of_host.drafts(), of_host.top_tokens, of_host.promises, strict=True)
            for index, (draft, top_tokens, promises) in enumerate(found):
                made[left[index]] = DraftRead(draft, top_tokens, index not in invalid, promises)
        if begun is not None:
            made |= zip(chained, begun.read(of_device), strict=True)
        for place, request in enumerate(requests):
            if not made[place].is_valid:
                self.clear(request.engine_sequence)
        in_order = [made[place] for place in range(len(requests))]
        self.top_tokens = [each.top_tokens for each in in_order]
        self.promises = [each.promises for each in in_order]
        return [each.draft for each in in_order]

    @abstractmethod
    def _limited(self, request: DraftRequest) -> DraftRequest:
        """Returns the request, limited to what the drafter and its cache allow."""

    @abstractmethod
    def _begin(self, requests: Sequence[DraftRequest]) -> ChainsUnderWay | None:
        """Launches chains on the device; returns None if there is no graph for them."""

    @abstractmethod
    def _grown(self, requests: Sequence[DraftRequest]) -> Trees:
        """Makes Drafts position by position, and waits for the tokens of each position."""


def verdict_feed(judging: Judging) -> Feed:
    """Returns the feed of a Verdict's tokens, each at the position after which it is chosen.

    The tokens are placeholders, which ``read_verdicts`` replaces.
    """
    start = judging.start + judging.num_tokens - len(judging.rows)
    return feed_of(judging.request.engine_sequence, judging.told_tokens, start, num_logits=1)


def verdicts_in(
    batch: Batch, result: StepResult[Tensor] | None, group: RankGroup | None
) -> tuple[Tensor, Tensor]:
    """Runs ``read_verdicts`` for a batch with Verdicts of the target; returns its result at all ranks.

    result: result of the target's choice of tokens, on the device; None at ranks other than 0.
    """
    from outrider.engine.kernels.verdict import read_verdicts

    assert batch.choice is not None
    last_rows = batch.logit_rows
    if result is None:
        found = torch.empty_like(last_rows), last_rows.new_empty(len(last_rows), len(TOLD), dtype=torch.int32)
    else:
        chosen = result.top_tokens, result.are_accepted
        found = read_verdicts(batch.token_ids[0], last_rows, *chosen, batch.choice)
    if group is not None:
        for numbers in (batch.token_ids, *found):
            group.spread(numbers)
    return found


def is_chosen_by_device(request: DraftRequest) -> bool:
    """Whether a device can choose all tokens of a Draft: a chain whose settings do not read the text."""
    sequence = request.engine_sequence
    is_coupled = sequence.sampling.verification == "coupled"
    return request.depth > 0 and is_coupled and sequence.needs_no_text and not request.alternatives


def choice_of(requests: Sequence[DraftRequest], path: tuple[int, ...] = ()) -> ChoiceInput:
    """Returns the input of the kernels that choose the tokens of chains. path: tokens before each chain."""
    rows = [request.engine_sequence.row((), path) for request in requests]
    return ChoiceInput.of_rows(rows, positions=[request.depth for request in requests])
