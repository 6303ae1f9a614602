"""Target drafters whose chains a device makes by itself: the host waits once, whatever the depth.

The host chooses the tokens of all other Drafts, position by position: trees, Drafts with their distributions,
and Drafts for which a grammar or the text decides what may be said.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.outcomes import TopTokens
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.device_time import Mark, mark, wait_for
from outrider.engine.drafters.target_drafter import TargetDrafter
from outrider.engine.drafters.trees import Trees
from outrider.engine.inputs.choice_input import ChoiceInput


@dataclass(frozen=True)
class _DraftRead:
    """A Draft as the host reads it."""

    draft: Draft
    top_tokens: list[TopTokens]  # at each position of its chain
    is_valid: bool  # whether all numbers from which it was chosen are finite


class ChainDrafter(TargetDrafter):
    """Drafter with chains of a device, and Drafts of the host."""

    makes_chains = False  # whether the device makes chains: not before its graphs are captured

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        requests = [*map(self._limited, requests)]
        made: dict[int, _DraftRead] = {}  # Drafts by place of the request
        chained = [place for place, request in enumerate(requests) if self._is_chain(request)]
        of_device = [requests[place] for place in chained]
        begun = self._begin(of_device) if of_device else None
        left = [place for place in range(len(requests)) if begun is None or place not in chained]
        if left:
            of_host = self._grown([requests[place] for place in left])
            invalid = {*of_host.invalid}
            for index, (draft, top_tokens) in enumerate(
                zip(of_host.drafts(), of_host.top_tokens, strict=True)
            ):
                made[left[index]] = _DraftRead(draft, top_tokens, index not in invalid)
        if begun is not None:
            made |= zip(chained, begun.read(of_device), strict=True)
        for place, request in enumerate(requests):
            if not made[place].is_valid:
                self._clear(request)
        in_order = [made[place] for place in range(len(requests))]
        self.top_tokens = [each.top_tokens for each in in_order]
        return [each.draft for each in in_order]

    def _is_chain(self, request: DraftRequest) -> bool:
        sequence = request.engine_sequence
        is_coupled = sequence.sampling.verification == "coupled"
        is_wanted = self.makes_chains and request.depth > 0
        return is_wanted and is_coupled and sequence.needs_no_text and not request.alternatives

    @abstractmethod
    def _limited(self, request: DraftRequest) -> DraftRequest:
        """Returns the request as far as the drafter and its cache can meet it."""

    @abstractmethod
    def _begin(self, requests: Sequence[DraftRequest]) -> "ChainsUnderWay | None":
        """Begins to make chains on the device; returns None if there is no graph for them."""

    @abstractmethod
    def _grown(self, requests: Sequence[DraftRequest]) -> Trees:
        """Makes Drafts, and waits for the tokens of each position."""

    def _clear(self, request: DraftRequest) -> None:
        """Clears what a Draft has left in the cache that is not finite."""


@dataclass(frozen=True)
class ChainsUnderWay:
    """Chains on their way to the host."""

    arriving: Tensor  # int32 [positions, rows, ranks + 1] DraftChains.found
    arrival: Mark

    @classmethod
    def of(cls, found: Tensor) -> "ChainsUnderWay":
        """Begins to copy chains to the host. found: DraftChains.found."""
        arriving = found.to("cpu", non_blocking=True)  # in pinned memory
        return cls(arriving, mark(found.device))

    def read(self, requests: Sequence[DraftRequest]) -> list[_DraftRead]:
        """Waits for the tokens, and returns the Drafts."""
        wait_for(self.arrival)
        by_row = self.arriving[:, : len(requests)].transpose(0, 1).tolist()
        return [_read(request, found) for request, found in zip(requests, by_row, strict=True)]


def _read(request: DraftRequest, found: list[list[int]]) -> _DraftRead:
    """found: the best tokens of each position, and whether a token may come from there."""
    ends, top_tokens = request.engine_sequence.end_token_ids, list[TopTokens]()
    positions = found[: request.depth]
    for *best, is_valid in positions:
        if not is_valid:
            break
        top_tokens.append(tuple(best))
        if best[0] in ends:
            break
    chain = Draft.chain([best for best, *_ in top_tokens])
    return _DraftRead(chain, top_tokens, all(is_valid for *_, is_valid in positions))


def choice_of(requests: Sequence[DraftRequest]) -> ChoiceInput:
    """Returns the input of the kernels that choose the tokens of chains."""
    rows = [request.engine_sequence.row((), ()) for request in requests]
    return ChoiceInput.of_rows(rows, positions=[request.depth for request in requests])
