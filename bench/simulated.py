"""Workers without a model: step times come from a cost table, and the acceptance rate is given.

Everything else is the service's own code: the gateway's rounds, drafting and pace, and the translation of
messages. The engines' scheduling, draft-ahead and waiting for fuller batches are also real.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bench.simulated_runner import (
    MAX_LENGTH,
    RIGHT,
    SETTINGS,
    VOCAB_SIZE,
    WRONG,
    Cost,
    RankOf,
    SimulatedRunner,
    StepClock,
)
from bench.simulated_worker import SimulatedStream, SimulatedWorker
from gateway.sequence import GatewaySequence
from gateway.workers.fleet import Fleet
from gateway.workers.streams import WorkerInfo
from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.draft import Draft
from outrider.decoding.outcomes import RANKS
from outrider.drafters.registry import row_of
from outrider.engine.choosing.draft_request import DraftedSequence, DraftRequest
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.drafters.target_drafter import Target, TargetDrafter
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import TargetDrafterSettings
from outrider.pace.experts import NO_EXPERTS, ExpertsRead
from outrider.pace.step import StepSize
from protos.trust import Trust


@dataclass(frozen=True)
class Ahead:
    """Draft-ahead of a draft, and how often it is correct."""

    branches: int = 0  # Verdicts of all streams for which a draft prepares in idle time; 0: no draft-ahead
    hit_rate: float = 0.0  # probability that the second guess is correct if the first guess is wrong


@dataclass(frozen=True)
class SimulatedDraft:
    """Draft in a worker of its own."""

    cost: Cost
    rank_of: RankOf
    ahead: Ahead = Ahead()
    is_beside: bool = False  # whether it shares the target's device; its messages then take no time

    def guesses(self, row: ChoiceContext) -> tuple[int, ...]:
        return self.guesses_at(row.noise_key, row.position)

    def guesses_at(self, noise_key: int, position: int) -> tuple[int, ...]:
        """Returns its best tokens at a position of a sequence, best first."""
        rank = self.rank_of(noise_key, position)
        return WRONG[:RANKS] if rank is None else (*WRONG[:rank], RIGHT, *WRONG[rank : RANKS - 1])

    def worker(self, of_target: asyncio.Lock) -> SimulatedWorker:
        """Returns the draft's worker. of_target: lock of the target's device."""
        device = of_target if self.is_beside else asyncio.Lock()
        settings = SETTINGS.model_copy(update={"draft_ahead": self.ahead.branches, "is_draft": True})
        return SimulatedWorker("draft", settings, self.cost, self.guesses, device)


class InTarget(TargetDrafter):
    """Draft in the target's process. Its chains follow the Verdicts on the device, without the host."""

    def __init__(self, draft: SimulatedDraft, clock: StepClock) -> None:
        """clock: simulated clock of the target."""
        self.info, self.number, self._from = row_of("colocated"), 0, ""
        settings = SETTINGS.model_copy(update={"draft_ahead": 0, "is_draft": True})

        def seconds(size: StepSize, is_early: bool) -> float:
            return draft.cost(size, True)

        self._model = DraftModel(
            Engine(SimulatedRunner(settings, seconds, draft.guesses, clock), clock=clock)
        )

    def load(self, target: Target) -> None:
        """Does nothing: there is no model."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = self._model.propose_within(max(request.depth for request in requests), requests)
        pairs = zip(requests, drafts, strict=True)
        self.top_tokens = [self._model.top_tokens_of(request.sequence, draft) for request, draft in pairs]
        return drafts

    def forget(self, sequence: DraftedSequence) -> None:
        self._model.forget(sequence)


class BlockInTarget(TargetDrafter):
    """Block draft in the target's process: a single step guesses all tokens of a Draft."""

    def __init__(self, draft: SimulatedDraft, clock: StepClock) -> None:
        """clock: clock of the target."""
        self.info, self.number, self._from = row_of("dflash"), 0, ""
        self._draft, self._clock = draft, clock

    def load(self, target: Target) -> None:
        """Does nothing: there is no model."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        rows = sum(request.depth for request in requests)
        context = sum(len(request.sequence.tokens) for request in requests)
        self._clock.advance(self._draft.cost(StepSize(len(requests), rows, 0.0, context), True))
        self.top_tokens = [self._top_tokens(request) for request in requests]
        return [Draft.chain([best[0] for best in guessed]) for guessed in self.top_tokens]

    def _top_tokens(self, request: DraftRequest) -> list[tuple[int, ...]]:
        sequence = request.engine_sequence
        length = len(sequence.tokens)
        return [self._draft.guesses_at(sequence.noise_key, length + place) for place in range(request.depth)]


class SimulatedFleet(Fleet):
    """One target, and a worker for each draft."""

    def __init__(
        self, target: SimulatedWorker, drafts: Mapping[str, tuple[SimulatedWorker, float]], hop_s: float
    ) -> None:
        """drafts: workers by name, each with the seconds of one hop."""
        super().__init__(self._all, Trust(token="of a simulated fleet"))
        self._target, self._drafts, self._hop_s = target, drafts, hop_s

    def _all(self) -> Iterable[WorkerInfo]:
        target = WorkerInfo(
            "target", "simulated", "target", 0, "here", VOCAB_SIZE, MAX_LENGTH, gpus=self._target.gpus
        )
        drafts = (
            replace(target, role="draft", address=name, draft=name, gpus=worker.gpus, survey=worker.survey)
            for name, (worker, _) in self._drafts.items()
        )
        return [replace(target, survey=self._target.survey), *drafts]

    def open_target(self, sequence: GatewaySequence, *, is_isolated: bool = False) -> Any:
        return SimulatedStream(self._target, sequence, self._hop_s)

    def open_draft(self, draft: str, sequence: GatewaySequence, *, is_isolated: bool = False) -> Any:
        worker, hop_s = self._drafts[draft]
        return SimulatedStream(worker, sequence, hop_s)


@asynccontextmanager
async def simulated_fleet(
    target: Cost,
    drafts: Mapping[str, SimulatedDraft],
    hop_s: float,  # seconds one way
    in_target: tuple[str, SimulatedDraft] | None = None,  # draft in the target's process, and its drafter
    experts: ExpertsRead = NO_EXPERTS,  # experts that the target's steps read
) -> AsyncIterator[SimulatedFleet]:
    device, settings, make = asyncio.Lock(), SETTINGS, None
    if in_target is not None:
        name, draft = in_target
        beside = {name: TargetDrafterSettings(checkpoint="simulated")}
        settings = SETTINGS.model_copy(update={"drafters": beside})
        make = partial(BlockInTarget if name == "dflash" else InTarget, draft)
    targets = SimulatedWorker("target", settings, target, lambda row: (RIGHT,), device, make, experts)
    workers = {
        name: (draft.worker(device), 0.0 if draft.is_beside else hop_s) for name, draft in drafts.items()
    }
    async with asyncio.TaskGroup() as running:
        every = targets, *(worker for worker, _ in workers.values())
        tasks = [running.create_task(worker.run()) for worker in every]
        yield SimulatedFleet(targets, workers, hop_s)
        for task in tasks:
            task.cancel()


def rank_at(acceptance_rate: float, hit_rate: float, noise_key: int, position: int) -> int | None:
    """Returns 0 if the first guess is correct, 1 if the second is, else None; a function of its arguments."""
    if _is_drawn(acceptance_rate, f"{noise_key}/{position}"):
        return 0
    return 1 if _is_drawn(hit_rate, f"{noise_key}/{position}/runner-up") else None


def _is_drawn(rate: float, key: str) -> bool:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < rate * 2**64
