"""Which drafter drafts: for each task the one with the most tokens per second at the present load."""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from gateway.routing.candidates import Candidate
from gateway.routing.rollout import Rollout
from outrider.decoding.settings import Verification
from outrider.drafters.registry import DrafterInfo
from outrider.pace.acceptance import TaskAcceptance
from outrider.pace.controller import Pace
from outrider.pace.exploration import Watches
from outrider.pace.settings import PaceSettings
from outrider.telemetry.reasons import RouteReason

logger = logging.getLogger("ray.serve")

MAX_KINDS = 4096  # task labels come from clients: what was not seen for longest is forgotten
DECIDED_FOR_S = 0.5  # for which a decision holds
ENOUGH_SAMPLES = 24.0  # before these what is taken for likely beforehand weighs too much


@dataclass(frozen=True)
class Kind:
    """Of sequences that are drafted alike."""

    task: str | None
    rule: Verification


@dataclass
class _Record:
    """What is known of one drafter for one kind."""

    # Other than the pace's: to say nothing counts as a wrong guess here.
    acceptance: TaskAcceptance = field(default_factory=TaskAcceptance)


@dataclass
class _Decision:
    """In force for one kind at one target."""

    name: str
    reason: str = RouteReason.FIRST
    at: float = -math.inf  # in the event loop's time


class Router:
    """Of one gateway. It learns from all sequences, and decides for those whose request names no drafter."""

    def __init__(self, is_ready: Callable[[DrafterInfo], bool]) -> None:
        """is_ready: whether a drafter can be asked now."""
        self._is_ready = is_ready
        self._records = lru_cache(MAX_KINDS)(lambda kind, name: _Record())
        self._decisions = lru_cache(MAX_KINDS)(lambda kind, pace, first: _Decision(first))
        self._rollouts: dict[str, dict[Kind, Rollout]] = {}  # by new draft
        self._watches = Watches()

    def observe(self, kind: Kind, name: str, right: int, verified: int) -> None:
        """A drafter was asked for tokens of which so many were right, and for so many it is known."""
        self._records(kind, name).acceptance.observe(right, verified)
        if name in self._rollouts:
            self._rollout(kind, name).observe()

    def roll_out(self, names: Iterable[str]) -> None:
        """These drafts are new, and no others are. Of one that was new before, its shares stay."""
        self._rollouts = {name: self._rollouts.get(name, {}) for name in names}

    @property
    def rollouts(self) -> Iterator[tuple[Kind, str, Rollout]]:
        """Of each new draft, for each kind of sequences that there were."""
        for name, of_draft in self._rollouts.items():
            for kind, rollout in of_draft.items():
                yield kind, name, rollout

    def is_known(self, kind: Kind, name: str) -> bool:
        """Whether enough is, to choose the drafter."""
        return _is_known(self._records(kind, name).acceptance)

    def choice(self, kind: Kind, candidates: Sequence[Candidate], pace: Pace) -> tuple[str, str]:
        """Name of the drafter, and why it is that one.

        candidates: none that is new; the first one drafts until more is known.
        """
        decision: _Decision = self._decisions(kind, pace, candidates[0].name)
        now = asyncio.get_running_loop().time()
        if now - decision.at >= DECIDED_FOR_S:
            decision.at = now
            self._decide(decision, kind, candidates, pace)
        return decision.name, decision.reason

    def admitted(self, kind: Kind, candidates: Sequence[Candidate], pace: Pace) -> Candidate | None:
        """The new draft of whose share a sequence is that begins."""
        new = [one for one in candidates if one.is_new and self._decided_share(kind, one, candidates, pace)]
        return next((one for one in new if self._rollout(kind, one.name).admits()), None)

    def keeps(self, kind: Kind, candidate: Candidate, candidates: Sequence[Candidate], pace: Pace) -> bool:
        """Whether a new draft may go on with a sequence of its share."""
        return self._decided_share(kind, candidate, candidates, pace) > 0.0

    def lost(self, kind: Kind, name: str) -> None:
        """No worker with the new draft goes on with a sequence of its share."""
        if name in self._rollouts:
            rollout = self._rollout(kind, name)
            before = rollout.share
            rollout.go_back()
            _tell(kind, name, before, rollout)

    def share(self, kind: Kind, name: str) -> float:
        """Of the sequences that a new draft drafts."""
        return self._rollout(kind, name).share if name in self._rollouts else 0.0

    def _decided_share(
        self, kind: Kind, new: Candidate, candidates: Sequence[Candidate], pace: Pace
    ) -> float:
        """As ``share``, decided anew if the newest decision is old."""
        if new.name not in self._rollouts:
            return 0.0  # it has left, or is new no more
        rollout, now = self._rollout(kind, new.name), asyncio.get_running_loop().time()
        if now - rollout.decided_at >= DECIDED_FOR_S:
            rollout.decided_at, before = now, rollout.share
            if self._is_ready(new.info):
                others = [one for one in candidates if not one.is_new]
                best = max(self._rates(kind, others, pace).values(), default=0.0)
                rate = self._rates(kind, [new], pace).get(new.name, 0.0)
                rollout.compare(rate, best, pace.settings.hysteresis)
            else:
                rollout.go_back()
            _tell(kind, new.name, before, rollout)
        return rollout.share

    def _rollout(self, kind: Kind, name: str) -> Rollout:
        of_draft = self._rollouts[name]
        if kind not in of_draft and len(of_draft) >= MAX_KINDS:
            del of_draft[next(iter(of_draft))]
        return of_draft.setdefault(kind, Rollout())

    def watched(self, kind: Kind, others: Sequence[Candidate], settings: PaceSettings) -> list[Candidate]:
        """Drafters that guess beside a new sequence which another one drafts.

        An index costs next to nothing, so it always does. Others are chosen within the budget of exploration.
        """
        if not settings.explores:
            return []
        free = [one for one in others if one.info.is_index]
        costly = {one.name: one for one in others if one not in free and self._is_ready(one.info)}
        known = {name: self.is_known(kind, name) for name in costly}
        return free + [costly[name] for name in self._watches.begun(settings, kind, known)]

    def _decide(self, decision: _Decision, kind: Kind, candidates: Sequence[Candidate], pace: Pace) -> None:
        ready = [one for one in candidates if self._is_ready(one.info)]
        rates = self._rates(kind, ready, pace)
        present = decision.name if any(one.name == decision.name for one in ready) else None
        if present is None:
            decision.name = next((one.name for one in ready), candidates[0].name)
        if (present is not None and present not in rates) or not any(rates.values()):
            decision.reason = RouteReason.FIRST
            return
        best = max(rates, key=lambda name: rates[name])
        if present is None or rates[best] > (1.0 + pace.settings.hysteresis) * rates[present]:
            decision.name = best
        decision.reason = RouteReason.MEASURED

    def _rates(self, kind: Kind, candidates: Sequence[Candidate], pace: Pace) -> dict[str, float]:
        """Tokens per second that each is worth whose acceptance is known; 0 where costs are not."""
        return {
            one.name: pace.rate(one.info, acceptance.rates(), one.paced.max_depth)
            for one in candidates
            if self._is_ready(one.info) and _is_known(acceptance := self._acceptance(kind, one.name))
        }

    def _acceptance(self, kind: Kind, name: str) -> TaskAcceptance:
        """Returns the acceptance of coupled verification if that of the rule itself is not known.

        Rejection sampling and block verification judge no guess by the text. What they accept more often is
        likely to be what coupled verification accepts more often.
        """
        own: TaskAcceptance = self._records(kind, name).acceptance
        if kind.rule == "coupled" or _is_known(own):
            return own
        coupled: TaskAcceptance = self._records(Kind(kind.task, "coupled"), name).acceptance
        return coupled


def _tell(kind: Kind, name: str, before: float, rollout: Rollout) -> None:
    """The log, where the share has changed."""
    if rollout.share != before:
        logger.info(
            "new draft %r drafts %g of the sequences of task %r under %s, after %g: "
            "it is worth %.0f tokens per second, others %.0f",
            *(name, rollout.share, kind.task, kind.rule, before, rollout.rate, rollout.rate_of_others),
        )


def _is_known(acceptance: TaskAcceptance) -> bool:
    return acceptance.is_known and acceptance.samples >= ENOUGH_SAMPLES
