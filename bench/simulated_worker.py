"""A worker without a model in the gateway's event loop, and the gateway's end of its streams."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from actors.messages import Answer
from actors.translation import DraftTranslation, TargetTranslation
from bench.simulated_head import BesideSimulated, SimulatedHead
from bench.simulated_runner import NO_HOST, Cost, Host, Launching, SimulatedRunner, StepClock
from gateway.sequence import GatewaySequence
from gateway.workers.streams import Role
from outrider.decoding.choice_context import ChoiceContext
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from outrider.engine.tasks.task import Task
from outrider.engine.work import Failed, Result
from outrider.engine.work import Load as EngineLoad
from protos import rounds_pb2

EPSILON_S = 1e-6  # in which messages that were sent at the same time all arrive


@dataclass(frozen=True)
class Begun:
    """A step that is under way."""

    tasks: Sequence[Task]
    replies: Sequence[tuple[int, Any]]  # with the number of their sequence
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
        rank: Callable[[ChoiceContext], tuple[int, ...]],
        mask_token: int | None = None,
        head: SimulatedHead | None = None,
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
    sequence: GatewaySequence
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

    async def receive(
        self, round_number: int, timeout: float | None = None, stretch: int | None = None
    ) -> Any:
        try:
            async with asyncio.timeout(timeout):
                while (reply := await self._replies.get()).round not in (stretch, round_number):
                    pass
        except TimeoutError:
            return None
        return reply

    def answer(self, reply: Any) -> None:
        self._to_gateway.send(reply)

    def close(self) -> None:
        self.worker.close(self._number)
