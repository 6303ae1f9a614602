"""Drafts that a device was given to make, on their way to the host."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.decoding.draft import Draft, Verdict
from outrider.decoding.outcomes import TopTokens
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.device_time import Mark, mark, seconds_between, wait_for
from outrider.engine.sequence import EngineSequence


@dataclass(frozen=True)
class DraftRead:
    """A Draft as the host reads it."""

    draft: Draft
    top_tokens: Sequence[TopTokens]  # at each position of its chain
    is_valid: bool = True  # whether all numbers from which it was chosen are finite
    promises: Sequence[float] = ()  # as in ``TargetDrafter.promises``


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

    def read(self, requests: Sequence[DraftRequest]) -> list[DraftRead]:
        """Waits for the tokens, and returns the Drafts."""
        wait_for(self.arrival)
        by_row = self.arriving[:, : len(requests)].transpose(0, 1).tolist()
        return [_read(request, found) for request, found in zip(requests, by_row, strict=True)]


def _read(request: DraftRequest, found: list[list[int]]) -> DraftRead:
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
    return DraftRead(chain, top_tokens, all(is_valid for *_, is_valid in positions))


@dataclass(frozen=True)
class DraftsUnderWay:
    """Chains that were begun before the host knew the Verdicts that they follow."""

    requests: Sequence[DraftRequest]  # requests with the depths that were begun
    sizes: Sequence[int]  # sizes of DraftChains.found
    arriving: Tensor  # int32: DraftChains.found, then last token and accepted tokens of each Verdict
    started: Mark  # moment when the target's tokens were chosen
    arrival: Mark

    def read(self) -> "dict[EngineSequence, DraftForeseen]":
        """Waits for the Drafts, and returns them."""
        wait_for(self.arrival)
        count = math.prod(self.sizes)
        found = self.arriving[:count].view(*self.sizes).transpose(0, 1).tolist()
        told = self.arriving[count:].view(-1, 2).tolist()
        return {
            request.engine_sequence: DraftForeseen(token, accepted, of_row[: request.depth])
            for request, (token, accepted), of_row in zip(self.requests, told, found, strict=False)
        }

    @property
    def seconds(self) -> float:
        """Seconds that the device took for them, once they have arrived."""
        return seconds_between(self.started, self.arrival)


@dataclass(frozen=True)
class DraftForeseen:
    """Draft that follows a Verdict as the device has found it."""

    token: int  # last token of the Verdict
    accepted: int
    found: list[list[int]]  # best tokens at each position, and whether a token may come from there

    @property
    def is_valid(self) -> bool:
        """Whether all numbers from which it was chosen are finite."""
        return all(is_valid for *_, is_valid in self.found)

    def follows(self, verdict: Verdict) -> bool:
        """Whether the Verdict is what the device has found."""
        return len(verdict.accepted) == self.accepted and verdict.tokens[-1] == self.token

    def read(self, request: DraftRequest) -> DraftRead:
        """Returns the Draft, as deep as is wanted."""
        return _read(request, self.found)
