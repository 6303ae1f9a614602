"""Judges drafters that do not draft a sequence: their guesses are compared with the committed text.

Under keyed noise a guess is correct if and only if it is what the target said, at any temperature. So a
drafter is judged by the committed text, and no target is asked.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from gateway.drafters.target import from_verdict
from gateway.errors import SequenceLostError, WorkerLostError
from gateway.events import Events, GuessJudged
from gateway.proposal import NO_PROPOSAL, Proposal
from gateway.routing.router import CandidateDrafter
from gateway.routing.tuning import TUNING
from gateway.sequence import GatewaySequence
from outrider.decoding.lease import NO_LEASE, Lease
from outrider.learning.agreement import agreement
from outrider.pace.tuning import TUNING as PACE_TUNING

PROBE_DEPTH = PACE_TUNING.probe_depth  # tokens of a guess
UNKNOWN = -TUNING.small_lag - 1  # value of ``taken_in`` for a drafter that has read nothing: it always lags


@dataclass
class _Watch:
    """A drafter that guesses for the sequence now and then."""

    candidate: CandidateDrafter
    is_judged: bool  # False: it only reads the text, and makes no guesses
    asking: asyncio.Task[None] | None = None
    guess: Proposal = NO_PROPOSAL  # newest guess, until it is compared
    taken_in: int = UNKNOWN  # tokens of the sequence that it has read
    asked_at: int = 0  # length of the sequence at its newest request
    is_given_up: bool = False  # its worker was lost with the sequence, which may be the cause


class Judge:
    """Asks the watched drafters of one sequence for guesses, and compares them with its text."""

    def __init__(
        self, sequence: GatewaySequence, events: Events, period: Callable[[CandidateDrafter], int]
    ) -> None:
        """period: returns the number of tokens between two guesses of a drafter."""
        self._sequence = sequence
        self._events = events
        self._period = period
        self._watches: dict[str, _Watch] = {}

    def watch(self, candidates: Iterable[CandidateDrafter]) -> None:
        """Starts to ask these drafters for guesses now and then."""
        for candidate in candidates:
            self._watches.setdefault(candidate.name, _Watch(candidate, self._sequence.is_coupled))

    @property
    def tried_with_verdict(self) -> Lease:
        """Drafter and depth of a Draft that the target must send with its next Verdict, as a guess."""
        wanted = next(filter(self._wants_of_target, self._watches.values()), None)
        return NO_LEASE if wanted is None else Lease(depth=PROBE_DEPTH, drafter=wanted.candidate.name)

    def is_warm(self, candidate: CandidateDrafter) -> bool:
        """Returns whether the drafter's KV cache is nearly up to date; always True if it asks no worker."""
        if not candidate.info.asks_worker:
            return True
        watch = self._watches.get(candidate.name)
        return watch is not None and len(self._sequence) - watch.taken_in <= TUNING.small_lag

    async def release(self, candidate: CandidateDrafter) -> None:
        """Stops watching a drafter that drafts from now on, and waits for the end of its pending request."""
        watch = self._watches.pop(candidate.name, None)
        if watch is not None and watch.asking is not None:
            watch.asking.cancel()
            await asyncio.gather(watch.asking, return_exceptions=True)

    def has_drafted(self, name: str) -> None:
        """Records that a watched drafter has made a Draft, which a Verdict judges."""
        if (watch := self._watches.get(name)) is not None:
            watch.asked_at = len(self._sequence)

    def on_tokens(self, *, takes_drafts: bool) -> None:
        """Judges guesses by the sequence's new tokens, and requests new guesses.

        takes_drafts: whether a Draft that came with the Verdict is a guess, because no target drafter drafts
            now.
        """
        for watch in self._watches.values():
            comes_with_verdicts = watch.candidate.info.comes_with_verdicts
            if comes_with_verdicts and takes_drafts:
                self._take_from_target(watch)
            self._compare(watch)
            if self._is_due(watch) and not comes_with_verdicts:
                watch.asked_at = len(self._sequence)
                watch.asking = asyncio.create_task(self._ask(watch))

    async def aclose(self) -> None:
        """Stops watching all drafters."""
        for watch in [*self._watches.values()]:
            await self.release(watch.candidate)

    def _is_due(self, watch: _Watch) -> bool:
        is_idle = watch.asking is None and not watch.guess.wanted and not watch.is_given_up
        has_room = len(self._sequence) + PROBE_DEPTH < self._sequence.limit
        return is_idle and has_room and len(self._sequence) >= watch.asked_at + self._period(watch.candidate)

    def _wants_of_target(self, watch: _Watch) -> bool:
        return watch.candidate.info.comes_with_verdicts and watch.is_judged and self._is_due(watch)

    def _take_from_target(self, watch: _Watch) -> None:
        """Takes the Draft of the newest Verdict as the drafter's guess: the target will not verify it."""
        came = self._sequence.draft
        if came is not None and came.drafter == watch.candidate.name and not watch.guess.wanted:
            self._sequence.draft = None
            watch.asked_at = len(self._sequence)
            watch.guess = from_verdict(came, self._sequence, PROBE_DEPTH)

    async def _ask(self, watch: _Watch) -> None:
        depth = PROBE_DEPTH if watch.is_judged else 0
        try:
            proposal = await watch.candidate.drafter.propose(depth)
            watch.taken_in = proposal.base
            watch.guess = replace(proposal, wanted=depth)
        except WorkerLostError as lost:
            watch.taken_in = UNKNOWN
            watch.is_given_up = isinstance(lost, SequenceLostError)
        finally:
            watch.asking = None

    def _compare(self, watch: _Watch) -> None:
        """Compares the newest guess with the text, once the text is longer than the guess."""
        guess = watch.guess
        if not guess.wanted:
            return
        text = self._sequence.since(guess.base)
        if len(text) < len(guess.draft) + 1:
            return
        watch.guess = NO_PROPOSAL
        found = agreement(guess.draft.tokens[: guess.draft.chain_length], text)
        self._events.emit(GuessJudged(watch.candidate.name, found.correct, guess))
