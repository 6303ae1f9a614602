"""An engine without a model: its steps take as long as a cost table says, in the event loop's time."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gateway.sequence import Sequence
from outrider.decoding.draft import Draft
from outrider.pace.cost_model import Step, StepSize
from protos import rounds_pb2
from protos.conversions import step_to_message

PREFILL_CHUNK = 512
LONGEST_SUFFIX = 64  # tokens; what is longer is a prompt chunk, as beyond one cache block in the engine
EPSILON_S = 1e-6  # in which messages that were sent at the same time all arrive


@dataclass(frozen=True)
class Hardware:
    """What a forward pass takes: the roofline of one model on its devices.

    The longer of reading weights and cache and of computing, and a constant for launches and collectives.
    """

    weight_bytes: float
    bytes_per_s: float  # all devices together, as far as it can be reached
    flops_per_token: float
    flops_per_s: float  # all devices together, as far as it can be reached
    cache_bytes_per_token: float  # of context
    constant_s: float

    def seconds(self, size: StepSize) -> float:
        tokens = size.tokens + size.prompt_tokens
        read = (self.weight_bytes + self.cache_bytes_per_token * size.context_tokens) / self.bytes_per_s
        return self.constant_s + max(read, tokens * self.flops_per_token / self.flops_per_s)


Cost = Callable[[StepSize], float]


@dataclass
class Work:
    """What one stream asked for last."""

    round: int
    tokens: int  # to be fed before anything is answered: committed ones, and a Draft's
    since: float
    draft: Draft | None = None  # to be verified
    until: int | None = None  # plain decoding up to this length
    depth: int = 0  # of the Draft that is asked for
    steps: int = 1  # until the answer; a draft takes one per token
    ahead: rounds_pb2.AheadOutcome | None = None


@dataclass(eq=False)
class SimulatedStream:
    """The gateway's end: as gateway.workers.streams.WorkerStream, with a delay per hop."""

    engine: "SimulatedEngine"
    sequence: Sequence
    hop_s: float
    known: int = 0
    replies: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    work: Work | None = None
    round: int = 0  # newest that the worker was asked for
    written: int = 0  # tokens that the worker has cached
    said: int = 0  # tokens that the worker holds committed
    is_open: bool = True

    @property
    def address(self) -> str:
        return self.engine.address

    def turn(self, round_number: int, traceparent: str = "") -> rounds_pb2.Turn:
        base, self.known = self.known, len(self.sequence)
        return rounds_pb2.Turn(round=round_number, base=base, tokens=self.sequence.since(base))

    async def send(self, request: Any, timeout: float = math.inf) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self.hop_s, self.engine.take, self, request)

    async def receive(self, round_number: int, timeout: float | None = None) -> Any:
        try:
            async with asyncio.timeout(timeout):
                while (reply := await self.replies.get()).round != round_number:
                    pass
        except TimeoutError:
            return None
        return reply

    def answer(self, reply: Any) -> None:
        asyncio.get_running_loop().call_later(self.hop_s, self.replies.put_nowait, reply)

    async def aclose(self) -> None:
        self.is_open = False
        self.engine.leave(self)


class SimulatedEngine:
    """Steps over everything that has work, one after the other; messages are taken on between two steps."""

    def __init__(self, address: str, cost: Cost) -> None:
        self.address = address
        self._cost = cost
        self._streams: dict[SimulatedStream, None] = {}  # in order of arrival
        self._arrived: list[tuple[SimulatedStream, Any, float]] = []  # messages, and when they came
        self._woken = asyncio.Event()
        self.steps = 0

    def take(self, stream: SimulatedStream, request: Any) -> None:
        """A message has arrived."""
        self._arrived.append((stream, request, asyncio.get_running_loop().time()))
        self._woken.set()

    def leave(self, stream: SimulatedStream) -> None:
        self._streams.pop(stream, None)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            working = self._working()
            if working and (patience := self.patience(working)) > 0.0:
                if await self._is_woken_within(patience):
                    continue
                working = self._working()
            if working:
                await self._step(working)
            elif not await self.idle():
                self._woken.clear()
                await self._woken.wait()
                await asyncio.sleep(EPSILON_S)

    def _working(self) -> list[SimulatedStream]:
        """Those with work, once all that has arrived is taken on."""
        for stream, request, arrived in self._arrived:
            if stream.is_open:
                self._streams[stream] = None
                stream.work = self.work_of(stream, request, arrived)
                stream.round = getattr(request, request.WhichOneof("request")).turn.round
        self._arrived.clear()
        return [stream for stream in self._streams if stream.work is not None]

    async def _is_woken_within(self, seconds: float) -> bool:
        self._woken.clear()
        try:
            async with asyncio.timeout(seconds):
                return await self._woken.wait()
        except TimeoutError:
            return False

    async def _step(self, working: list[SimulatedStream]) -> None:
        budget, prompts, tokens = PREFILL_CHUNK, 0, 0
        ready: list[tuple[SimulatedStream, Work]] = []
        for stream in working:
            work = stream.work
            assert work is not None
            if work.tokens > LONGEST_SUFFIX:
                chunk = min(budget, work.tokens)
                budget, prompts, work.tokens = budget - chunk, prompts + chunk, work.tokens - chunk
                if work.tokens:
                    continue
            else:
                tokens += work.tokens
            ready.append((stream, work))
        step = await self.forward(working, tokens, prompts)
        self.stepped(step)
        now = asyncio.get_running_loop().time()
        for stream, work in ready:
            if stream.is_open:
                timings = rounds_pb2.Timings(
                    step_ns=int(step.seconds * 1e9),
                    total_ns=int((now - work.since) * 1e9),
                    last_step=step_to_message(step),
                )
                self.advance(stream, work, timings)

    async def forward(self, streams: list[SimulatedStream], tokens: int, prompt_tokens: int = 0) -> Step:
        """One forward pass."""
        context = sum(len(stream.sequence) for stream in streams)
        size = StepSize(len(streams), tokens, prompt_tokens, context)
        seconds = self._cost(size)
        await asyncio.sleep(seconds)
        self.steps += 1
        return Step(self.steps, size, seconds)

    def work_of(self, stream: SimulatedStream, request: Any, arrived: float) -> Work | None:
        """What there is to be done now that the message has come."""
        raise NotImplementedError

    def advance(self, stream: SimulatedStream, work: Work, timings: rounds_pb2.Timings) -> None:
        """The step that fed its tokens is over."""
        raise NotImplementedError

    def stepped(self, step: Step) -> None:
        return

    def patience(self, working: list[SimulatedStream]) -> float:
        return 0.0

    async def idle(self) -> bool:
        """A step for which nobody waits; False: there is none."""
        return False
