"""Drafters by name, for the sequences of one gateway."""

from typing import Any

from gateway.drafters.drafter import SequenceDrafter
from gateway.drafters.index import GatewayDrafter
from gateway.drafters.mixed import MixedDrafter, Promises
from gateway.drafters.target import VerdictDrafter
from gateway.drafters.worker import WorkerDrafter
from gateway.roster import Roster
from gateway.sequence import GatewaySequence
from gateway.workers.fleet import Fleet
from outrider.drafters.past_answers import PastAnswers
from outrider.drafters.registry import DrafterInfo, drafter
from outrider.learning.lru import Lru

RECALLED = 2048  # tokens of past answers for a target: some 6 KB, read in four steps; chosen
MAX_TASKS = 1024  # entries; bounded since labels come from clients


class Drafters:
    """Creates the drafters of sequences."""

    def __init__(self, fleet: Fleet, roster: Roster, past: PastAnswers | None = None) -> None:
        """past: store of past answers; None: no answer is kept."""
        self._fleet = fleet
        self.roster = roster
        self._past = PastAnswers() if past is None else past
        self._promises = Lru[tuple[str | None, str, str], Promises](MAX_TASKS)

    def of(self, info: DrafterInfo, sequence: GatewaySequence) -> SequenceDrafter:
        """Returns the drafter of a row. Raises ValueError if the deployment lacks a drafter that it mixes."""
        if info.mixes is not None and not info.is_united:
            return self._mixed(info.name, info.mixes, sequence)
        if info.asks_worker:
            return WorkerDrafter(self._fleet, info.name, sequence)
        if info.comes_with_verdicts:
            return self._with_verdicts(info, sequence)
        return self._index(info, sequence)[0]

    def _mixed(self, name: str, mixes: tuple[str, ...], sequence: GatewaySequence) -> SequenceDrafter:
        of_other, of_index = mixes
        other = self.of(self.roster.find(of_other), sequence)
        index = self._index(drafter(of_index), sequence)
        key = sequence.scope.task, name, sequence.sampling.verification
        promises = self._promises.get(key, Promises)
        return MixedDrafter((of_other, of_index), other, index, promises, sequence)

    def _with_verdicts(self, info: DrafterInfo, sequence: GatewaySequence) -> SequenceDrafter:
        _, *indices = info.mixes or (info.name,)
        if not any(drafter(index).remembers for index in indices):
            return VerdictDrafter(sequence)
        sequence.past = self._past.newest(sequence.scope, RECALLED)
        return VerdictDrafter(sequence, self._past)

    def _index(self, info: DrafterInfo, sequence: GatewaySequence) -> tuple[SequenceDrafter, Any]:
        """Returns the gateway drafter of an index, and the index."""
        if info.remembers:
            index = info.load()(self._past, sequence.scope)
            return GatewayDrafter(index, sequence, self._past), index
        if info.reads_prediction:
            index = info.load()(sequence.prediction, len(sequence.prompt))
        else:
            index = info.load()()
        return GatewayDrafter(index, sequence), index
