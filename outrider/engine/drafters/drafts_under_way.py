"""Drafts that a device is making, and their transfer to the host."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.decoding.draft import Draft, Verdict
from outrider.decoding.outcomes import Branch, TopTokens
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.device_time import Mark, mark, seconds_between, wait_for
from outrider.engine.inputs.told_tokens import TOLD
from outrider.engine.sequence import UNKNOWN, EngineSequence
from outrider.engine.tasks.propose import extended


@dataclass(frozen=True)
class DraftRead:
    """Draft that the host has read."""

    draft: Draft
    top_tokens: Sequence[TopTokens]  # at each position of its chain
    is_valid: bool = True  # whether all numbers from which it was chosen are finite
    promises: Sequence[float] = ()  # as in ``TargetDrafter.promises``


@dataclass(frozen=True)
class ChainsUnderWay:
    """Chains that are being copied to the host."""

    arriving: Tensor  # int32 [positions, rows, ranks + 1] DraftChains.found
    arrival: Mark

    @classmethod
    def of(cls, found: Tensor) -> "ChainsUnderWay":
        """Starts the copy of chains to the host. found: ``DraftChains.found``."""
        arriving = found.to("cpu", non_blocking=True)  # in pinned memory
        return cls(arriving, mark(found.device))

    def read(self, requests: Sequence[DraftRequest]) -> list[DraftRead]:
        """Waits for the tokens, and returns the Drafts."""
        wait_for(self.arrival)
        by_row = self.arriving[:, : len(requests)].transpose(0, 1).tolist()
        return [_read(request, found) for request, found in zip(requests, by_row, strict=True)]


def _read(request: DraftRequest, found: list[list[int]]) -> DraftRead:
    """Returns the Draft of a row, which ends before an invalid position or with an end token.

    found: best tokens of each position, and whether a token may be chosen there.
    """
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
    branches: Sequence[Sequence[Branch]]  # alternatives of each chain
    sizes: Sequence[int]  # shape of DraftChains.found: positions, rows, and numbers of a position
    numbers: Tensor  # int32 on the device: the TOLD numbers of each Verdict, then DraftChains.found
    arriving: Tensor  # copy of ``numbers`` to the host
    started: Mark  # moment when the target's tokens were chosen
    arrival: Mark

    def read(self) -> "dict[EngineSequence, DraftForeseen]":
        """Waits for the Drafts, and returns them."""
        wait_for(self.arrival)
        count = len(self.requests) * len(TOLD)
        told = self.arriving[:count].view(-1, len(TOLD)).tolist()
        found = self.arriving[count:].view(*self.sizes).transpose(0, 1).tolist()
        return {
            request.engine_sequence: DraftForeseen(token, accepted, of_row[: request.depth])
            for request, (token, accepted, _), of_row in zip(self.requests, told, found, strict=False)
        }

    def tree_of(self, row: int) -> tuple[Draft, list[int]]:
        """Returns the tree of a Draft whose tokens are unknown, and the index of each token in ``numbers``.

        The first index is that of the Verdict's last token.
        """
        positions, rows, width = self.sizes
        depth = min(self.requests[row].depth, positions)
        branches = [each for each in self.branches[row] if each.accepted < depth and each.rank < width - 1]
        tree = extended(
            Draft.chain([UNKNOWN] * depth),
            # Siblings must differ: the rank stands for a token that only the device knows.
            [(each.accepted - 1, each.rank) for each in branches],
        )
        of_found = [(position, 0) for position in range(depth)]
        of_found += [(each.accepted, each.rank) for each in branches]
        first = len(self.requests) * len(TOLD)
        places = [first + (position * rows + row) * width + rank for position, rank in of_found]
        return tree, [row * len(TOLD), *places]

    @property
    def seconds(self) -> float:
        """Seconds that the device took to make the Drafts; known once they have arrived."""
        return seconds_between(self.started, self.arrival)


@dataclass(frozen=True)
class DraftForeseen:
    """Draft that the device made after the Verdict that it found."""

    token: int  # last token of the Verdict
    accepted: int
    found: list[list[int]]  # best tokens at each position, and whether a token may be chosen there

    @property
    def is_valid(self) -> bool:
        """Whether all numbers from which it was chosen are finite."""
        return all(is_valid for *_, is_valid in self.found)

    def follows(self, verdict: Verdict) -> bool:
        """Whether the Draft follows this Verdict, because the device found it too."""
        return len(verdict.accepted) == self.accepted and verdict.tokens[-1] == self.token

    def read(self, request: DraftRequest) -> DraftRead:
        """Returns the Draft, cut to the requested depth."""
        return _read(request, self.found)
