"""How good the drafters are that do not draft a sequence: their guesses, compared with what the target said.

Under keyed noise a guess is right if and only if it is what the target said, at any temperature. So a drafter
is judged by the committed text, and no target is asked.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from gateway.errors import SequenceLostError, WorkerLostError
from gateway.events import Events, Judged
from gateway.proposal import NO_PROPOSAL, Proposal
from gateway.routing.candidates import SMALL_LAG, Candidate
from gateway.sequence import GatewaySequence
from outrider.decoding.draft import agreed
from outrider.pace.tuning import TUNING

UNKNOWN = -SMALL_LAG - 1  # of a drafter that has taken nothing in


@dataclass
class _Watched:
    candidate: Candidate
    is_judged: bool  # or else it only takes the text in
    asking: asyncio.Task[None] | None = None
    guess: Proposal = NO_PROPOSAL  # that has not been compared yet
    taken_in: int = UNKNOWN  # tokens of the sequence that it knows
    asked_at: int = 0  # length of the sequence when it was asked last
    is_given_up: bool = False  # a worker was lost with the sequence: it may be what ended that


class Judge:
    """Of one sequence."""

    def __init__(self, sequence: GatewaySequence, events: Events, period: Callable[[Candidate], int]) -> None:
        """period: tokens from one guess of a drafter to its next."""
        self._sequence = sequence
        self._events = events
        self._period = period
        self._watched: dict[str, _Watched] = {}

    def watch(self, candidates: Iterable[Candidate]) -> None:
        """From now on they guess now and then."""
        for candidate in candidates:
            self._watched.setdefault(candidate.name, _Watched(candidate, self._sequence.is_coupled))

    @property
    def depth_beside_target(self) -> int:
        """Of a Draft that the target is to send with its next Verdict, for it to be judged; 0: none."""
        return TUNING.probe_depth if any(map(self._wants_of_target, self._watched.values())) else 0

    def is_warm(self, candidate: Candidate) -> bool:
        """Whether it has taken in nearly all of the text. Nobody else's is as far as it is."""
        if not candidate.info.asks_worker:
            return True
        watched = self._watched.get(candidate.name)
        return watched is not None and len(self._sequence) - watched.taken_in <= SMALL_LAG

    async def release(self, candidate: Candidate) -> None:
        """It drafts from now on: nobody else asks it any more once this returns."""
        watched = self._watched.pop(candidate.name, None)
        if watched is not None and watched.asking is not None:
            watched.asking.cancel()
            await asyncio.gather(watched.asking, return_exceptions=True)

    def grew(self) -> None:
        """The sequence has more tokens."""
        for watched in self._watched.values():
            if watched.candidate.info.comes_with_verdicts:
                self._take_from_target(watched)
            self._compare(watched)
            if self._is_due(watched) and not watched.candidate.info.comes_with_verdicts:
                watched.asked_at = len(self._sequence)
                watched.asking = asyncio.create_task(self._ask(watched))

    async def aclose(self) -> None:
        """Nobody is asked any more."""
        for watched in [*self._watched.values()]:
            await self.release(watched.candidate)

    def _is_due(self, watched: _Watched) -> bool:
        is_idle = watched.asking is None and not watched.guess.wanted and not watched.is_given_up
        has_room = len(self._sequence) + TUNING.probe_depth < self._sequence.limit
        return (
            is_idle and has_room and len(self._sequence) >= watched.asked_at + self._period(watched.candidate)
        )

    def _wants_of_target(self, watched: _Watched) -> bool:
        return watched.candidate.info.comes_with_verdicts and watched.is_judged and self._is_due(watched)

    def _take_from_target(self, watched: _Watched) -> None:
        """The newest Verdict brought a Draft that nobody verifies."""
        if self._sequence.draft is not None and not watched.guess.wanted:
            draft, self._sequence.draft = self._sequence.draft, None
            watched.asked_at = len(self._sequence)
            step = self._sequence.draft_step
            watched.guess = Proposal(draft, len(self._sequence), step=step, wanted=TUNING.probe_depth)

    async def _ask(self, watched: _Watched) -> None:
        depth = TUNING.probe_depth if watched.is_judged else 0
        try:
            proposal = await watched.candidate.drafter.propose(depth)
            watched.taken_in = proposal.base
            watched.guess = replace(proposal, wanted=depth)
        except WorkerLostError as lost:
            watched.taken_in = UNKNOWN
            watched.is_given_up = isinstance(lost, SequenceLostError)
        finally:
            watched.asking = None

    def _compare(self, watched: _Watched) -> None:
        """Once the text has gone on long enough."""
        guess = watched.guess
        if not guess.wanted:
            return
        text = self._sequence.since(guess.base)
        if len(text) < len(guess.draft) + 1:
            return
        watched.guess = NO_PROPOSAL
        right = agreed(guess.draft.tokens[: guess.draft.chain_length], text)
        self._events.emit(Judged(watched.candidate.name, right, guess))
