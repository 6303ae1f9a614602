"""Workers without a model: steps take as long as a cost table says, drafts are right as often as it says.

Everything else is the service's own code: the gateway's rounds, drafting and pace, the translation of
messages, and the engines with their scheduling, draft-ahead and waiting for company.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from collections.abc import Sequence as Texts
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from actors.messages import Answer
from actors.translation import DraftTranslation, TargetTranslation
from bench.simulated_runner import (
    MAX_LENGTH,
    NO_HOST,
    VOCAB_SIZE,
    Cost,
    Host,
    Launching,
    SimulatedRunner,
    StepClock,
)
from gateway.sequence import Sequence
from gateway.workers.fleet import Fleet
from gateway.workers.streams import Role, Worker
from outrider.decoding.draft import Draft
from outrider.decoding.outcomes import RANKS
from outrider.decoding.row import Row
from outrider.engine.asked import Asked
from outrider.engine.drafters.beside_target import BesideTarget, Target
from outrider.engine.engine import Engine
from outrider.engine.settings import EngineSettings
from outrider.engine.tasks.task import Task
from outrider.engine.work import Failed, Result
from outrider.engine.work import Load as EngineLoad
from outrider.pace.cost_model import StepSize
from protos import rounds_pb2
from protos.trust import Trust

RIGHT = 0  # the target always says so
WRONG = tuple(range(1, RANKS + 1))  # what a draft may say instead
MASK = VOCAB_SIZE - 1  # of a draft that guesses in one pass
EPSILON_S = 1e-6  # in which messages that were sent at the same time all arrive
SETTINGS = EngineSettings(model="simulated", block_size=64, prefill_chunk=512, max_sequences=256)

RankOf = Callable[[int, int], int | None]  # noise key and position -> of the target's token among the draft's


@dataclass(frozen=True)
class Ahead:
    """Draft-ahead."""

    branches: int = 0  # verdicts, of all streams together, that a draft prepares for in idle time; 0: none
    runner_up_rate: float = 0.0  # how often the draft's second guess is right where its first is wrong


@dataclass(frozen=True)
class Parallel:
    """A draft that guesses all positions in one pass, and does not see what was drawn before them."""

    kept: float = 1.0  # share of its acceptance that each position keeps of the one before


@dataclass(frozen=True)
class Begun:
    """A step that is under way."""

    tasks: Texts[Task]
    replies: Texts[tuple[int, Any]]  # with the number of their sequence
    left: int  # sequences that go on without a message
    launched_at: float
    device_s: float

    @property
    def ends_at(self) -> float:
        return self.launched_at + self.device_s


class SimulatedWorker:
    """An engine in the event loop: messages are taken on between two steps."""

    def __init__(
        self,
        role: Role,
        settings: EngineSettings,
        cost: Cost,
        rank: Callable[[Row], tuple[int, ...]],
        mask_token: int | None = None,
        head: "SimulatedHead | None" = None,
        host: Host = NO_HOST,
    ) -> None:
        """
        Args:
            mask_token: of a model that drafts in one pass.
            head: beside a target.
            host: where there is no head.
        """
        self.role: Role = role
        self._translation = TargetTranslation if role == "target" else DraftTranslation
        loop = asyncio.get_running_loop()
        self._now, self._clock = loop.time, StepClock(loop.time)
        self._host = host
        self._runner = SimulatedRunner(
            settings,
            lambda size: host.launching_s(int(size.sequences)) + cost(size),
            rank,
            self._clock,
            mask_token,
        )
        beside = None if head is None else BesideSimulated(head, self._clock)
        self._engine = Engine(self._runner, beside, clock=self._clock)
        self._streams: dict[int, SimulatedStream] = {}  # by number of their sequence
        self._arrived: list[tuple[int, Any, float]] = []  # number, message, and when it came
        self._woken = asyncio.Event()

    def open(self, stream: "SimulatedStream") -> int:
        """Returns the number of its sequence."""
        sequence = stream.sequence
        opened = self._engine.open(len(sequence.prompt), sequence.noise_key, sequence.sampling)
        self._streams[opened.number] = stream
        return opened.number

    def close(self, number: int) -> None:
        """Closing twice does nothing more."""
        if self._streams.pop(number, None) is not None:
            self._engine.close(self._engine.sequence(number))

    def take(self, number: int, request: Any) -> None:
        """A message has arrived."""
        self._arrived.append((number, request, self._now()))
        self._woken.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self._submit()
            if not self._engine.has_work:
                self._woken.clear()
                await self._woken.wait()
                await asyncio.sleep(EPSILON_S)
                continue
            patience = self._engine.patience()
            if patience > 0.0 and await self._is_woken_within(patience):
                continue
            await self._step()

    def _submit(self) -> None:
        arrived, self._arrived = self._arrived, []
        for number, request, at in arrived:
            if number in self._streams:
                turn, work = self._translation.work(number, request)
                self._streams[number].round = turn.round
                self._engine.submit(work, at)

    async def _is_woken_within(self, seconds: float) -> bool:
        self._woken.clear()
        try:
            async with asyncio.timeout(seconds):
                return await self._woken.wait()
        except TimeoutError:
            return False

    async def _step(self) -> None:
        """One, and those that are launched early after it."""
        step: Begun | None = self._begin()
        while step is not None:
            following = await self._follows(step)
            await self._until(self._now() + self._host.processing_s(len(step.tasks)))
            self._deliver(step)
            step = following

    def _begin(self) -> Begun:
        self._runner.selected = []
        results, load = self._engine.step(), self._engine.load()
        tasks = [task for task, _ in self._runner.selected]
        launching_s = self._host.launching_s(len(tasks)) if tasks else 0.0
        launched_at, device_s = self._now() + launching_s, self._clock.fall_back() - launching_s
        replies = [self._reply(result, load) for result in results]
        return Begun(tasks, replies, load.running + load.waiting, launched_at, device_s)

    def _reply(self, result: Result, load: EngineLoad) -> tuple[int, Any]:
        if isinstance(result, Failed):
            raise RuntimeError(result.reason)
        number = result.sequence
        answer = Answer(self._streams[number].round, result, load, finished_ns=0)
        return number, self._translation.reply(answer)

    async def _follows(self, step: Begun) -> Begun | None:
        """At the end of a step: the one after, where it was launched early."""
        following, launching = None, self._host.launching
        if launching is Launching.COMPLETE:
            while following is None and (left_s := step.ends_at - self._now()) > 0.0:
                following = self._begin_early(step)
                if following is None:
                    await self._is_woken_within(left_s)
        elif launching in (Launching.AT_ITS_END, Launching.FORESEEN):
            others = len(self._streams) - len(step.tasks)
            lead_s = self._host.launching_s(others) if launching is Launching.FORESEEN else 0.0
            await self._until(step.ends_at - lead_s)
            following = self._begin_early(step)
        await self._until(step.ends_at)
        if following is None:
            return None
        await self._until(following.launched_at)  # the host has no time for tokens before
        return replace(following, launched_at=max(following.launched_at, step.ends_at))

    def _begin_early(self, step: Begun) -> Begun | None:
        if step.left:
            return None  # they would be left out: their next tokens are not known yet
        self._submit()
        load = self._engine.load()
        if not (back := load.running + load.waiting):
            return None
        if self._host.launching is Launching.COMPLETE and back < len(self._streams) - len(step.tasks):
            return None
        self._clock.advance(max(step.ends_at - self._now(), 0.0))
        patience = self._engine.patience()  # as it will be at the end of the step
        self._clock.fall_back()
        return None if patience > 0.0 else self._begin()

    async def _until(self, moment: float) -> None:
        if (seconds := moment - self._now()) > 0.0:
            await asyncio.sleep(seconds)

    def _deliver(self, step: Begun) -> None:
        for number, reply in step.replies:
            if number in self._streams:
                self._streams[number].answer(reply)


class Hop:
    """One way between two processes. Messages keep their order, which timers that are due at once do not."""

    def __init__(self, seconds: float, arrive: Callable[[Any], None]) -> None:
        self._seconds, self._arrive = seconds, arrive
        self._under_way: deque[Any] = deque()

    def send(self, message: Any) -> None:
        self._under_way.append(message)
        asyncio.get_running_loop().call_later(self._seconds, self._arrived)

    def _arrived(self) -> None:
        self._arrive(self._under_way.popleft())


@dataclass(eq=False)
class SimulatedStream:
    """The gateway's end: as gateway.workers.streams.WorkerStream, with a delay per hop."""

    worker: SimulatedWorker
    sequence: Sequence
    hop_s: float
    round: int = 0  # newest that the worker was asked for
    _known: int = 0  # tokens of the sequence that the worker was told
    _replies: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self._number = number = self.worker.open(self)
        self._to_worker = Hop(self.hop_s, lambda request: self.worker.take(number, request))
        self._to_gateway = Hop(self.hop_s, self._replies.put_nowait)

    @property
    def address(self) -> str:
        return self.worker.role

    def turn(self, round_number: int, traceparent: str = "") -> rounds_pb2.Turn:
        base, self._known = self._known, len(self.sequence)
        return rounds_pb2.Turn(round=round_number, base=base, tokens=self.sequence.since(base))

    def send(self, request: Any) -> None:
        self._to_worker.send(request)

    async def receive(self, round_number: int, timeout: float | None = None) -> Any:
        try:
            async with asyncio.timeout(timeout):
                while (reply := await self._replies.get()).round != round_number:
                    pass
        except TimeoutError:
            return None
        return reply

    def answer(self, reply: Any) -> None:
        self._to_gateway.send(reply)

    def close(self) -> None:
        self.worker.close(self._number)


@dataclass(frozen=True)
class SimulatedDraft:
    """One draft, in a worker of its own."""

    cost: Cost
    rank_of: RankOf
    ahead: Ahead = Ahead()
    parallel: Parallel | None = None  # None: it needs a pass for each token

    def guesses(self, row: Row) -> tuple[int, ...]:
        rank = self.rank_of(row.noise_key, row.position)
        masks = row.path.count(MASK)
        key = f"{row.noise_key}/{row.position}/kept"
        if self.parallel and masks and not _is_drawn(self.parallel.kept**masks, key):
            rank = None
        return WRONG[:RANKS] if rank is None else (*WRONG[:rank], RIGHT, *WRONG[rank : RANKS - 1])

    def worker(self) -> SimulatedWorker:
        settings = SETTINGS.model_copy(update={"draft_ahead": self.ahead.branches})
        return SimulatedWorker(
            "draft", settings, self.cost, self.guesses, None if self.parallel is None else MASK
        )


@dataclass(frozen=True)
class SimulatedHead:
    """One that stands beside the target and drafts chains."""

    cost: Cost  # of one of its passes
    rank_of: RankOf


class BesideSimulated(BesideTarget):
    """By the registry's law for EAGLE-3 a Draft takes a pass for each token.

    The first of them takes in what the target has fed, as it does after every step, a plain one too.
    """

    def __init__(self, head: SimulatedHead, clock: StepClock) -> None:
        super().__init__(SETTINGS.model_copy(update={"drafter": "eagle3"}))
        self._head, self._clock = head, clock

    def load(self, target: Target) -> None:
        """There is nothing to be loaded."""

    def watch(self, texts: Texts[Any]) -> None:
        self._pass(len(texts))

    def propose(self, asked: Texts[Asked]) -> list[Draft]:
        drafts = [self._draft(one) for one in asked]
        for position in range(1, max(map(len, drafts))):
            self._pass(sum(len(draft) > position for draft in drafts))
        return drafts

    def _draft(self, asked: Asked) -> Draft:
        text, length = asked.text, len(asked.text.tokens)
        left = text.prompt_length + text.sampling.max_tokens - length - 1
        ranks = (
            self._head.rank_of(text.noise_key, length + offset) for offset in range(min(asked.depth, left))
        )
        return Draft.chain([RIGHT if rank == 0 else WRONG[0] for rank in ranks])

    def _pass(self, sequences: int) -> None:
        self._clock.advance(self._head.cost(StepSize(sequences, sequences)))


class SimulatedFleet(Fleet):
    """One target, and a worker for each draft."""

    def __init__(self, target: SimulatedWorker, drafts: Mapping[str, SimulatedWorker], hop_s: float) -> None:
        super().__init__(self._all, Trust(token="of a simulated fleet"))
        self._target, self._drafts, self._hop_s = target, drafts, hop_s

    def _all(self) -> Iterable[Worker]:
        target = Worker("target", "simulated", "target", 0, "here", VOCAB_SIZE, MAX_LENGTH)
        return [target, *(replace(target, role="draft", address=name, draft=name) for name in self._drafts)]

    def open_target(self, sequence: Sequence, *, apart: bool = False) -> Any:
        return SimulatedStream(self._target, sequence, self._hop_s)

    def open_draft(self, draft: str, sequence: Sequence) -> Any:
        return SimulatedStream(self._drafts[draft], sequence, self._hop_s)


@asynccontextmanager
async def simulated_fleet(
    target: Cost,
    drafts: Mapping[str, SimulatedDraft],
    hop_s: float,
    head: SimulatedHead | None = None,
    host: Host = NO_HOST,
) -> AsyncIterator[SimulatedFleet]:
    """
    Args:
        hop_s: one way.
        host: of the target, where there is no head.
    """
    targets = SimulatedWorker("target", SETTINGS, target, lambda row: (RIGHT,), head=head, host=host)
    workers = {name: draft.worker() for name, draft in drafts.items()}
    async with asyncio.TaskGroup() as running:
        tasks = [running.create_task(worker.run()) for worker in (targets, *workers.values())]
        yield SimulatedFleet(targets, workers, hop_s)
        for task in tasks:
            task.cancel()


def rank_at(acceptance_rate: float, runner_up_rate: float, noise_key: int, position: int) -> int | None:
    """0, or 1 for a runner-up; drawn by sequence and position alone: the same for every way to draft."""
    if _is_drawn(acceptance_rate, f"{noise_key}/{position}"):
        return 0
    return 1 if _is_drawn(runner_up_rate, f"{noise_key}/{position}/runner-up") else None


def runner_up_rate_for(foreseen_rate: float, acceptance_rate: float, depth: int) -> float:
    """The rate with which so many verdicts are foreseen, if there is a branch for every one of both ranks.

    A verdict is foreseen where the draft's own guesses stand throughout, the one after its Draft included,
    or else where the runner-up is right at the first that does not.
    """
    stands = acceptance_rate ** (depth + 1)
    return min(max((foreseen_rate - stands) / (1.0 - stands), 0.0), 1.0) if stands < 1.0 else 0.0


def _is_drawn(rate: float, key: str) -> bool:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < rate * 2**64
