"""Builds the loop of a sequence, with its drafters, its route and its listeners."""

from collections.abc import Iterator, Sequence

from gateway.drafters.factory import Drafters
from gateway.events import Events
from gateway.loop.answer_trace import NO_TRACE, NoTrace
from gateway.loop.draft_source import DraftSource
from gateway.loop.loop import SequenceLoop
from gateway.loop.parking import Parking
from gateway.loop.second_targets import SecondTargets
from gateway.loop.stats import Stats
from gateway.roster import INDICES
from gateway.routing.paces import Paces
from gateway.routing.route import Route
from gateway.routing.router import CandidateDrafter, Router, TaskRule
from gateway.sequence import GatewaySequence
from gateway.settings import GatewaySettings, Priority, Speculation
from gateway.workers.fleet import Fleet
from outrider.drafters.past_answers import PastAnswers
from outrider.drafters.registry import DrafterInfo, drafters, mixed


class LoopFactory:
    """Builds the loops of a gateway's sequences."""

    def __init__(self, fleet: Fleet, paces: Paces, settings: GatewaySettings) -> None:
        self._fleet = fleet
        self._paces = paces
        self._second_targets = SecondTargets(fleet, settings.second_targets_share)
        self.router = Router(self._is_ready)
        self._drafters = Drafters(fleet, settings.roster, PastAnswers(settings.past_answer_tokens))
        self.use(settings)

    def use(self, settings: GatewaySettings) -> None:
        """Applies the settings of drafters to the sequences that begin from now on."""
        self._settings = settings
        self._roster = self._drafters.roster = settings.roster
        self.router.roll_out(settings.new_drafts)

    def of(
        self,
        sequence: GatewaySequence,
        speculation: Speculation,
        deadline: float,
        task: str | None = None,
        priority: Priority = "interactive",
        trace: NoTrace = NO_TRACE,
        parking: Parking | None = None,
    ) -> SequenceLoop:
        """Returns the loop of one sequence.

        Args:
            speculation: resolved settings of the request.
            deadline: when to give up, in the event loop's time.
            task: label under which acceptance is counted.
            trace: listener that makes the spans of its rounds.
            parking: parks the sequence; None: it is never parked.
        """
        stats = Stats()
        events = Events([stats, trace])
        assert speculation.drafter is not None
        is_named = speculation.drafter in self._roster.names  # it may have left while the request was queued
        names = (speculation.drafter,) if is_named else self._settings.candidates
        rows = [self._roster.find(name) for name in names]
        if sequence.prediction and not is_named:
            rows = [*_with_prediction(rows), *rows]
        candidates = [
            CandidateDrafter(
                self._drafters.of(row, sequence),
                self._paces.sequence(row, speculation, task, priority),
                is_new=not is_named and row.name in self._settings.new_drafts,
            )
            for row in rows
        ]
        route = Route(candidates, self.router, TaskRule(task, speculation.verification), sequence, events)
        longest_wait_s = self._settings.propose_deadline_ms / 1e3
        source = DraftSource(sequence, route, speculation, events, longest_wait_s)
        return SequenceLoop(
            sequence,
            self._fleet,
            self._paces,
            source,
            events,
            stats,
            trace,
            deadline,
            self._settings.max_losses,
            parking or Parking(),
            self._second_targets,
        )

    def _is_ready(self, drafter: DrafterInfo) -> bool:
        """Returns whether a drafter can be asked: a worker drafter needs a worker."""
        if not drafter.asks_worker:
            return True
        return any(worker.draft == drafter.asked for worker in self._fleet.workers("draft"))


def _with_prediction(rows: Sequence[DrafterInfo]) -> Iterator[DrafterInfo]:
    """Yields the drafters that use a prediction: the prediction's index, and unions of target drafters.

    Each target drafter is united with all indices.
    """
    for prediction in drafters():
        if prediction.reads_prediction:
            yield prediction
            own = {row.asked: None for row in rows if row.comes_with_verdicts}
            yield from (mixed(name, prediction.name, *INDICES) for name in own)
