"""Choice of the drafter: for each task the drafter with the most tokens per second at the present load."""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gateway.drafters.drafter import SequenceDrafter
from gateway.routing.rollout import Rollout
from gateway.routing.tuning import TUNING
from outrider.decoding.settings import Verification
from outrider.drafters.registry import DrafterInfo
from outrider.learning.lru import Lru
from outrider.pace.acceptance import TaskAcceptance
from outrider.pace.controller import Pace
from outrider.pace.exploration import Watches
from outrider.pace.sequence import PacedSequence
from outrider.pace.settings import PaceSettings
from outrider.telemetry.reasons import RouteReason

logger = logging.getLogger(f"ray.serve.{__name__}")


@dataclass(frozen=True)
class CandidateDrafter:
    """A drafter that may draft one sequence."""

    drafter: SequenceDrafter
    paced: PacedSequence  # state of the sequence in the pace, with this drafter
    is_new: bool = False  # it is being rolled out, and gets only a share of the sequences

    @property
    def info(self) -> DrafterInfo:
        """The drafter's row."""
        return self.paced.drafter

    @property
    def name(self) -> str:
        """The drafter's name."""
        return self.info.name


@dataclass(frozen=True)
class TaskRule:
    """Task label and verification rule: drafters are judged for each pair separately."""

    task: str | None
    rule: Verification


@dataclass
class _Decision:
    """Drafter chosen for one task and rule at one target."""

    name: str
    reason: str = RouteReason.FIRST
    at: float = -math.inf  # in the event loop's time


class Router:
    """Learns from all sequences of a gateway, and chooses the drafter if a request names no drafter."""

    def __init__(self, is_ready: Callable[[DrafterInfo], bool]) -> None:
        """is_ready: returns whether a drafter can be asked now."""
        self._is_ready = is_ready
        # Unlike in the pace's acceptance, an empty guess counts as wrong here.
        self._acceptances = Lru[tuple[TaskRule, str], TaskAcceptance](TUNING.most_kinds)
        self._decisions = Lru[tuple[TaskRule, Pace, str], _Decision](TUNING.most_kinds)
        self._rollouts: dict[str, Lru[TaskRule, Rollout]] = {}  # key: new draft
        self._watches = Watches()

    def observe(self, kind: TaskRule, name: str, correct: int, reached: int) -> None:
        """Learns how many of a drafter's requested tokens were reached, and how many of these are correct."""
        self._own_acceptance(kind, name).observe(correct, reached)
        if name in self._rollouts:
            self._rollout(kind, name).seen += 1

    def roll_out(self, names: Iterable[str]) -> None:
        """Sets the drafts to roll out. A draft that is among them already keeps its shares."""
        self._rollouts = {name: self._rollouts.get(name, Lru(TUNING.most_kinds)) for name in names}

    @property
    def rollouts(self) -> Iterator[tuple[TaskRule, str, Rollout]]:
        """Roll-outs of all new drafts, each with its task and rule and the draft's name."""
        for name, of_draft in self._rollouts.items():
            for kind, rollout in of_draft.items():
                yield kind, name, rollout

    def is_known(self, kind: TaskRule, name: str) -> bool:
        """Returns whether enough is known about a drafter to choose it."""
        return _is_known(self._own_acceptance(kind, name))

    def choice(self, kind: TaskRule, candidates: Sequence[CandidateDrafter], pace: Pace) -> tuple[str, str]:
        """Returns the name of the chosen drafter, and the reason.

        candidates: drafters that are not new; the first drafts until more is known.
        """
        first = candidates[0].name
        decision = self._decisions.get((kind, pace, first), lambda: _Decision(first))
        now = asyncio.get_running_loop().time()
        if now - decision.at >= TUNING.decided_for_s:
            decision.at = now
            self._decide(decision, kind, candidates, pace)
        return decision.name, decision.reason

    def admitted(
        self, kind: TaskRule, candidates: Sequence[CandidateDrafter], pace: Pace
    ) -> CandidateDrafter | None:
        """Returns the new draft to whose share a new sequence belongs; None: it belongs to none."""
        new = [
            candidate
            for candidate in candidates
            if candidate.is_new and self._decided_share(kind, candidate, candidates, pace)
        ]
        return next((candidate for candidate in new if self._rollout(kind, candidate.name).admits()), None)

    def keeps(
        self, kind: TaskRule, candidate: CandidateDrafter, candidates: Sequence[CandidateDrafter], pace: Pace
    ) -> bool:
        """Returns whether a new draft may keep a sequence of its share."""
        return self._decided_share(kind, candidate, candidates, pace) > 0.0

    def lost(self, kind: TaskRule, name: str) -> None:
        """Takes all sequences from a new draft whose worker was lost."""
        if name in self._rollouts:
            rollout = self._rollout(kind, name)
            before = rollout.share
            rollout.go_back()
            _log_change(kind, name, before, rollout)

    def share(self, kind: TaskRule, name: str) -> float:
        """Returns the share of the sequences that a new draft gets."""
        return self._rollout(kind, name).share if name in self._rollouts else 0.0

    def watched(
        self, kind: TaskRule, others: Sequence[CandidateDrafter], settings: PaceSettings
    ) -> list[CandidateDrafter]:
        """Returns the drafters that make guesses for a new sequence while another drafter drafts it.

        A guess of an index costs next to nothing, so an index always guesses. Other drafters share the budget
        of exploration.
        """
        if not settings.explores:
            return []
        free = [candidate for candidate in others if candidate.info.is_index]
        costly = {
            candidate.name: candidate
            for candidate in others
            if candidate not in free and self._is_ready(candidate.info)
        }
        known = {name: self.is_known(kind, name) for name in costly}
        return free + [costly[name] for name in self._watches.begin(settings, kind, known)]

    def _decided_share(
        self, kind: TaskRule, new: CandidateDrafter, candidates: Sequence[CandidateDrafter], pace: Pace
    ) -> float:
        """Returns the share of a new draft, decided again if the newest decision is old."""
        if new.name not in self._rollouts:
            return 0.0  # it has left the service, or is no longer new
        rollout, now = self._rollout(kind, new.name), asyncio.get_running_loop().time()
        if now - rollout.decided_at >= TUNING.decided_for_s:
            rollout.decided_at, before = now, rollout.share
            if self._is_ready(new.info):
                others = [candidate for candidate in candidates if not candidate.is_new]
                best = max(self._rates(kind, others, pace).values(), default=0.0)
                rate = self._rates(kind, [new], pace).get(new.name, 0.0)
                rollout.compare(rate, best, pace.settings.hysteresis)
            else:
                rollout.go_back()
            _log_change(kind, new.name, before, rollout)
        return rollout.share

    def _rollout(self, kind: TaskRule, name: str) -> Rollout:
        return self._rollouts[name].get(kind, Rollout)

    def _decide(
        self, decision: _Decision, kind: TaskRule, candidates: Sequence[CandidateDrafter], pace: Pace
    ) -> None:
        ready = [candidate for candidate in candidates if self._is_ready(candidate.info)]
        rates = self._rates(kind, ready, pace)
        present = decision.name if any(candidate.name == decision.name for candidate in ready) else None
        if present is None:
            decision.name = next((candidate.name for candidate in ready), candidates[0].name)
        if (present is not None and present not in rates) or not any(rates.values()):
            decision.reason = RouteReason.FIRST
        else:
            best = max(rates, key=lambda name: rates[name])
            if present is None or rates[best] > (1.0 + pace.settings.hysteresis) * rates[present]:
                decision.name = best
            decision.reason = RouteReason.MEASURED
        logger.debug(
            "task %r under %s: %s drafts, %s; tokens per second %s",
            *(kind.task, kind.rule, decision.name, decision.reason, rates),
        )

    def _rates(self, kind: TaskRule, candidates: Sequence[CandidateDrafter], pace: Pace) -> dict[str, float]:
        """Returns the tokens per second of each drafter with known acceptance; 0 if costs are unknown."""
        return {
            candidate.name: pace.rate(candidate.info, acceptance.rates(), candidate.paced.max_depth)
            for candidate in candidates
            if self._is_ready(candidate.info)
            and _is_known(acceptance := self._acceptance(kind, candidate.name))
        }

    def _acceptance(self, kind: TaskRule, name: str) -> TaskAcceptance:
        """Returns the acceptance under a rule, or under coupled verification until that is known.

        The text cannot judge guesses under other rules. But a drafter with a higher acceptance under coupled
        verification probably has a higher acceptance under them too.
        """
        own = self._own_acceptance(kind, name)
        if kind.rule == "coupled" or _is_known(own):
            return own
        return self._own_acceptance(TaskRule(kind.task, "coupled"), name)

    def _own_acceptance(self, kind: TaskRule, name: str) -> TaskAcceptance:
        return self._acceptances.get((kind, name), TaskAcceptance)


def _log_change(kind: TaskRule, name: str, before: float, rollout: Rollout) -> None:
    if rollout.share != before:
        logger.info(
            "new draft %r drafts %g of the sequences of task %r under %s, after %g: "
            "it is worth %.0f tokens per second, others %.0f",
            *(name, rollout.share, kind.task, kind.rule, before, rollout.rate, rollout.rate_of_others),
        )


def _is_known(acceptance: TaskAcceptance) -> bool:
    return acceptance.is_known and acceptance.samples >= TUNING.known_guesses
