"""Puts together what generates one sequence."""

from gateway.drafters.factory import Drafters
from gateway.observe.answer_trace import NO_TRACE, NoTrace
from gateway.observe.stats import Stats
from gateway.rounds.drafting import Drafting
from gateway.rounds.events import Events
from gateway.rounds.paces import Paces
from gateway.rounds.rounds import Limits, Rounds
from gateway.sequence import Sequence
from gateway.settings import GatewaySettings, Priority, Speculation
from gateway.workers.fleet import Fleet
from outrider.drafters.past_answers import PastAnswers


class RoundsFactory:
    """Rounds for the sequences of one gateway."""

    def __init__(self, fleet: Fleet, paces: Paces, settings: GatewaySettings) -> None:
        self._fleet = fleet
        self._paces = paces
        self._settings = settings
        self._roster = settings.roster
        self._drafters = Drafters(fleet, self._roster, PastAnswers(settings.past_answer_tokens))

    def of(
        self,
        sequence: Sequence,
        speculation: Speculation,
        deadline: float,
        task: str | None = None,
        priority: Priority = "interactive",
        trace: NoTrace = NO_TRACE,
    ) -> Rounds:
        """
        Args:
            speculation: resolved.
            deadline: when to give up, in the event loop's time.
            task: label under which acceptance is counted.
            trace: for the spans of its rounds.
        """
        stats = Stats()
        events = Events([stats, trace])
        assert speculation.drafter is not None
        info = self._roster.find(speculation.drafter)
        drafter = None if speculation.mode == "off" else self._drafters.of(info.name, sequence)
        paced = self._paces.sequence(info, speculation, task, priority)
        longest_wait_s = self._settings.propose_deadline_ms / 1e3
        drafting = Drafting(sequence, drafter, speculation, paced, events, longest_wait_s)
        return Rounds(
            sequence,
            self._fleet,
            self._paces,
            drafting,
            events,
            stats,
            trace,
            Limits(deadline, self._settings.max_losses),
        )
