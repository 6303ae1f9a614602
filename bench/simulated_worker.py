"""Worker without a model that runs in the gateway's event loop, and the gateway's end of its streams."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from actors.messages import EngineAnswer
from actors.translation import TRANSLATIONS
from bench.simulated_runner import Cost, SimulatedRunner, StepClock
from gateway.sequence import GatewaySequence
from gateway.workers.streams import Role
from outrider.decoding.choice_context import ChoiceContext
from outrider.engine.drafters.target_drafter import TargetDrafter
from outrider.engine.drafters.target_drafters import TargetDrafters
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.survey import survey
from outrider.engine.settings import EngineSettings
from outrider.engine.work import EngineLoad, Failed, Result
from outrider.pace.experts import NO_EXPERTS, ExpertsRead
from protos import rounds_pb2

EPSILON_S = 1e-6  # seconds to wait for messages that were sent together


class SimulatedWorker:
    """Engine in the event loop; it receives messages between two steps."""

    def __init__(
        self,
        role: Role,
        settings: EngineSettings,
        cost: Cost,
        rank: Callable[[ChoiceContext], tuple[int, ...]],
        device: asyncio.Lock,
        drafter: Callable[[StepClock], TargetDrafter] | None = None,
        experts: ExpertsRead = NO_EXPERTS,
    ) -> None:
        """
        Args:
            device: lock that is held during a step; workers on one device share it.
            drafter: makes the target drafter; None: there is none.
            experts: experts that steps report as read.
        """
        self.role: Role = role
        self._translation = TRANSLATIONS[role]
        loop = asyncio.get_running_loop()
        self._now, self._clock = loop.time, StepClock(loop.time)
        self._runner = SimulatedRunner(settings, cost, rank, self._clock, experts)
        drafters = TargetDrafters([drafter(self._clock)] if drafter is not None else [])
        self._engine = Engine(self._runner, drafters, clock=self._clock)
        self.survey = survey(self._engine)
        self._clock.fall_back()  # the survey takes no time of the simulation
        self._streams: dict[int, SimulatedStream] = {}  # streams by number of the sequence
        self._arrived: list[tuple[int, Any, float]] = []  # number, message, time of arrival
        self._woken = asyncio.Event()
        self._device = device
        self.gpus = (str(id(device)),)  # ids of devices, as Ray reports them

    def open(self, stream: "SimulatedStream") -> int:
        """Opens the sequence of a stream and returns its number."""
        sequence = stream.sequence
        opened = self._engine.open(len(sequence.prompt), sequence.noise_key, sequence.sampling)
        self._streams[opened.number] = stream
        return opened.number

    def close(self, number: int) -> None:
        """Closes a sequence; idempotent."""
        if self._streams.pop(number, None) is not None:
            self._engine.close(self._engine.sequence(number))

    def take(self, number: int, request: Any) -> None:
        """Receives a message."""
        self._arrived.append((number, request, self._now()))
        self._woken.set()

    async def run(self) -> None:
        """Runs the engine until it is cancelled."""
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
            async with self._device:
                self._submit()
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
        """Runs a step and sends the replies when its simulated time is over."""
        results, load = self._engine.step(), self._engine.load()
        replies = [self._reply(result, load) for result in results]
        await asyncio.sleep(self._clock.fall_back())
        for number, reply in replies:
            if number in self._streams:
                self._streams[number].answer(reply)

    def _reply(self, result: Result, load: EngineLoad) -> tuple[int, Any]:
        if isinstance(result, Failed):
            raise RuntimeError(result.reason)
        number = result.sequence
        answer = EngineAnswer(self._streams[number].round, result, load, finished_ns=0)
        return number, self._translation.reply(answer)


class Hop:
    """Delayed channel between two processes. A queue keeps messages in order; equal timers would not."""

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
    """The gateway's end of a stream, like gateway.workers.streams.WorkerStream, with a delay per hop."""

    worker: SimulatedWorker
    sequence: GatewaySequence
    hop_s: float
    round: int = 0  # newest round that the worker was asked for
    _known: int = 0  # tokens of the sequence that the worker knows
    _replies: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self._number = number = self.worker.open(self)
        self._to_worker = Hop(self.hop_s, lambda request: self.worker.take(number, request))
        self._to_gateway = Hop(self.hop_s, self._replies.put_nowait)

    is_leaving: ClassVar[bool] = False

    @property
    def address(self) -> str:
        return self.worker.role

    @property
    def link(self) -> "SimulatedStream":
        """Returns the stream itself: the simulation needs nothing else of a link."""
        return self

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

    def arrived(self, round_number: int) -> None:
        """Returns None: each reply is committed when it arrives."""

    def answer(self, reply: Any) -> None:
        self._to_gateway.send(reply)

    def close(self) -> None:
        self.worker.close(self._number)
