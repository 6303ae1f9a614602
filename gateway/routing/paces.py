"""Paces of this gateway, a pace for each target, and the acceptance that they share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from gateway.events import (
    Compared,
    Drafted,
    Event,
    FellBack,
    GuessJudged,
    Overtaken,
    TokenDecoded,
    VerdictReceived,
)
from gateway.proposal import Proposal
from gateway.routing.route import Route
from gateway.routing.tuning import TUNING
from gateway.sequence import GatewaySequence
from gateway.settings import Priority, Speculation
from gateway.workers.streams import WorkerInfo, shares_gpu
from outrider.drafters.registry import DrafterInfo
from outrider.learning.lru import Lru
from outrider.pace.acceptance import SequenceAcceptance, TaskAcceptance
from outrider.pace.controller import Pace
from outrider.pace.costs import RoundTimes
from outrider.pace.sequence import PacedSequence
from outrider.pace.settings import PaceSettings
from outrider.pace.step import Step
from protos import rounds_pb2
from protos.conversions import step_from_message


class Paces:
    """Creates the pace of each target, and the state of each sequence in a pace."""

    def __init__(
        self, settings: PaceSettings, workers: Callable[[], Iterable[WorkerInfo]] = lambda: ()
    ) -> None:
        """workers: returns the workers, each with the step times that it measured before it served."""
        self._settings = settings
        self._workers = workers
        self._of_target: dict[str, Pace] = {}  # key: address
        self._acceptance = Lru[tuple[str | None, str, str], TaskAcceptance](TUNING.most_tasks)

    @property
    def settings(self) -> PaceSettings:
        return self._settings

    def use(self, settings: PaceSettings) -> None:
        """Applies settings from the next round on."""
        self._settings = settings
        for pace in self._of_target.values():
            pace.use(settings)

    def of_target(self, address: str) -> Pace:
        if address not in self._of_target:
            self._of_target[address] = Pace(self._settings, partial(self._surveyed, address))
        return self._of_target[address]

    def _surveyed(self, target: str, name: str) -> Sequence[Step]:
        """Returns the steps that a drafter of a target timed before it served.

        A draft worker on the target's own GPU was timed alone and is slower beside the target, so its steps
        are not used.

        name: name of the drafter; empty: the target's own steps.
        """
        workers = [*self._workers()]
        targets = [worker for worker in workers if worker.address == target]
        for worker in workers:
            if worker in targets and name in worker.survey:
                return worker.survey[name]
            if name and worker.draft == name:
                is_slowed = any(shares_gpu(worker, each) for each in targets)
                return () if is_slowed else worker.survey.get("", ())
        return ()

    def plain_rate(self, sequences: Mapping[str, int]) -> float | None:
        """Returns the tokens per second that plain decoding would give these sequences.

        Args:
            sequences: number of sequences, by address of their target.

        Returns:
            None while the rate is unknown for a target that has sequences.
        """
        rates = [self.of_target(address).plain_rate(count) for address, count in sequences.items() if count]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if len(known) == len(rates) else None

    def sequence(
        self, drafter: DrafterInfo, speculation: Speculation, task: str | None, priority: Priority
    ) -> PacedSequence:
        """Returns the state of a new answer in a pace; ``speculation`` is resolved."""
        acceptance = self._acceptance.get((task, drafter.name, speculation.verification), TaskAcceptance)
        return PacedSequence(
            drafter,
            SequenceAcceptance(acceptance),
            speculation.depth or 0,
            is_batch=priority == "batch",
        )


class PaceObserver:
    """Passes what happens to one sequence to the pace, which learns from it."""

    def __init__(self, route: Route, sequence: GatewaySequence) -> None:
        self._route = route
        self._sequence = sequence
        self._plain_round = 0  # round of the newest token of plain decoding
        self.pace: Pace | None = None  # pace at the target that verifies the sequence

    def on(self, event: Event) -> None:
        if self.pace is None:
            return
        match event:
            case VerdictReceived() if event.proposal.draft:
                self._observe_target(self.pace, event.reply)
                self._observe_round(self.pace, event)
            case VerdictReceived() | TokenDecoded():
                self._observe_target(self.pace, event.reply)
                self._observe_plain(self.pace, event.reply)
            case Drafted():
                paced = self._route.candidate(event.proposal.asked).paced
                self._observe_drafting(self.pace, paced, event.proposal)
                if event.proposal.ahead is not None and event.proposal.ahead.rank is not None:
                    self._paced.acceptance.task.observe_rank(event.proposal.ahead.rank)
            case FellBack() if event.waited_s is not None:
                self.pace.observe_late(self._paced, event.waited_s)
            case Overtaken():
                self._paced.acceptance.observe(event.correct, event.reached)
            case Compared():
                self.pace.observe_probe(self._paced, event.correct, event.reached)
            case GuessJudged():
                self._observe_judged(self.pace, event)

    @property
    def _paced(self) -> PacedSequence:
        """State of the sequence in the pace, with the current drafter."""
        return self._route.current().paced

    def _observe_judged(self, pace: Pace, event: GuessJudged) -> None:
        paced, guess = self._route.candidate(event.drafter).paced, event.guess
        self._observe_drafting(pace, paced, guess)
        if guess.draft:
            paced.acceptance.observe(event.correct, min(event.correct + 1, guess.draft.chain_length))

    @staticmethod
    def _observe_drafting(pace: Pace, paced: PacedSequence, proposal: Proposal) -> None:
        """Learns from a drafter's step. A Draft of an index has neither a step nor a worker."""
        paced.worker = proposal.worker or paced.worker
        if proposal.step is not None:
            pace.observe_drafting(paced, proposal.step)

    def _observe_target(self, pace: Pace, reply: rounds_pb2.TargetReply) -> None:
        self._paced.length = len(self._sequence)
        if reply.timings.HasField("last_step"):
            pace.observe_target(step_from_message(reply.timings.last_step), reply.load.decoding)

    def _observe_round(self, pace: Pace, event: VerdictReceived) -> None:
        """Learns from the Draft's chain, without tokens that a grammar forced."""
        proposal, chain, depth = event.proposal, event.chain, event.proposal.asked_length
        paced = self._route.candidate(proposal.asked).paced
        if paced.drafter.comes_with_verdicts and event.reply.HasField("rank"):
            paced.acceptance.task.observe_rank(event.reply.rank)
        times = RoundTimes(
            depth - sum(node < depth for node in event.reply.forced_nodes),
            proposal.seconds + event.overhead_s,
            proposal.overhead_s + event.overhead_s,
            event.reply.timings.total_ns / 1e9,
            proposal.ahead_hit,
        )
        further = event.accepted - chain.correct if paced.drafter.is_united else 0
        pace.observe_round(paced, chain.correct, chain.reached, times, further)

    def _observe_plain(self, pace: Pace, reply: rounds_pb2.TargetReply) -> None:
        """Learns from the tokens of plain decoding but the first, which waited for more than a step."""
        if reply.round == self._plain_round:
            pace.observe_plain(self._paced, reply.timings.total_ns / 1e9)
        self._plain_round = reply.round
