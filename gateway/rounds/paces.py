"""The pace in force at this gateway: one for each target; what is known of the drafts is shared."""

from collections.abc import Mapping
from functools import lru_cache

from gateway.settings import Priority, Speculation
from outrider.pace.acceptance import SequenceAcceptance, TaskAcceptance
from outrider.pace.controller import Pace, PacedSequence
from outrider.pace.settings import PaceSettings

MAX_TASKS = 1024  # labels come from clients: the one not seen for longest is forgotten


class Paces:
    def __init__(self, settings: PaceSettings) -> None:
        self._settings = settings
        self._of_target: dict[str, Pace] = {}  # by address
        self._acceptance = lru_cache(MAX_TASKS)(lambda task, drafter, rule: TaskAcceptance())

    @property
    def settings(self) -> PaceSettings:
        return self._settings

    def use(self, settings: PaceSettings) -> None:
        """In force from the next round on."""
        self._settings = settings
        for pace in self._of_target.values():
            pace.use(settings)

    def of_target(self, address: str) -> Pace:
        if address not in self._of_target:
            self._of_target[address] = Pace(self._settings)
        return self._of_target[address]

    def plain_rate(self, sequences: Mapping[str, int]) -> float:
        """Tokens per second that plain decoding would give so many sequences, by address of their target."""
        return sum(pace.plain_rate(sequences.get(address, 0)) for address, pace in self._of_target.items())

    def sequence(self, speculation: Speculation, task: str | None, priority: Priority) -> PacedSequence:
        """For one answer; ``speculation`` is resolved."""
        assert speculation.drafter is not None
        acceptance = self._acceptance(task, speculation.drafter, speculation.verification)
        return PacedSequence(
            speculation.drafter,
            SequenceAcceptance(acceptance),
            speculation.depth or 0,
            is_batch=priority == "batch",
        )
