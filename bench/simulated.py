"""Workers without a model: steps take as long as a cost table says, drafts are right as often as it says.

Everything else is the service's own code: rounds, drafting, pace, and when the target waits for company.
"""

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from decoding.pace.cost import Step, StepSize
from engine.gathering import Gathering
from gateway.fleet import Fleet
from gateway.sequence import Sequence
from gateway.streams import Worker
from protos import rounds_pb2
from protos.convert import step_to_message
from protos.trust import Trust

RIGHT, WRONG = 1, 0  # the target always says RIGHT; where a draft would say WRONG is drawn beforehand
PREFILL_CHUNK = 512
LONGEST_SUFFIX = 64  # tokens; what is longer is a prompt chunk, as beyond one cache block in the engine
MAX_LENGTH = 1 << 20
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
class _Work:
    """What one stream asked for last."""

    turn: rounds_pb2.Turn
    tokens: int  # to be fed before anything is answered: committed ones, and a Draft's
    steps: int = 1  # that give an answer; a draft takes one per token
    draft: rounds_pb2.Draft | None = None  # to be verified
    until: int | None = None  # plain decoding up to this length
    since: float = 0.0


@dataclass(eq=False)
class SimulatedStream:
    """The gateway's end: as gateway.streams.WorkerStream, with a delay per hop."""

    engine: "SimulatedEngine"
    sequence: Sequence
    hop_s: float
    known: int = 0
    replies: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    work: _Work | None = None
    written: int = 0  # tokens that the worker has cached
    said: int = 0  # tokens that the worker holds committed

    @property
    def address(self) -> str:
        return self.engine.address

    @property
    def lag(self) -> int:
        return len(self.sequence) - self.known

    def turn(self, round_number: int) -> rounds_pb2.Turn:
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
        self.engine.leave(self)


class SimulatedEngine:
    """Steps over everything that has work, one after the other."""

    def __init__(self, address: str, cost: Cost) -> None:
        self.address = address
        self._cost = cost
        self._streams: dict[SimulatedStream, None] = {}  # in order of arrival
        self._woken = asyncio.Event()
        self.steps = 0

    def take(self, stream: SimulatedStream, request: Any) -> None:
        """A message has arrived."""
        work = self.work_of(stream, request)
        work.since = asyncio.get_running_loop().time()
        stream.work = work
        self._streams[stream] = None
        self._woken.set()

    def leave(self, stream: SimulatedStream) -> None:
        self._streams.pop(stream, None)

    async def run(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            working = [stream for stream in self._streams if stream.work is not None]
            if not working:
                self._woken.clear()
                await self._woken.wait()
                await asyncio.sleep(EPSILON_S)
                continue
            if (patience := self.patience(working)) > 0.0:
                self._woken.clear()
                try:
                    async with asyncio.timeout(patience):
                        await self._woken.wait()
                    continue
                except TimeoutError:
                    working = [stream for stream in self._streams if stream.work is not None]
            await self._step(working, loop)

    async def _step(self, working: list[SimulatedStream], loop: asyncio.AbstractEventLoop) -> None:
        budget, prompts, tokens = PREFILL_CHUNK, 0, 0
        ready: list[tuple[SimulatedStream, _Work]] = []
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
        context = sum(len(stream.sequence) for stream in working)
        size = StepSize(len(working), tokens, prompts, context)
        seconds = self._cost(size)
        await asyncio.sleep(seconds)
        self.steps += 1
        step = Step(self.steps, size, seconds)
        self.stepped(step)
        for stream, work in ready:
            if stream.work is not work or stream not in self._streams:
                continue  # voided meanwhile
            timings = rounds_pb2.Timings(
                step_ns=int(seconds * 1e9),
                total_ns=int((loop.time() - work.since) * 1e9),
                last_step=step_to_message(step),
            )
            self.advance(stream, work, timings)

    def work_of(self, stream: SimulatedStream, request: Any) -> _Work:
        raise NotImplementedError

    def advance(self, stream: SimulatedStream, work: _Work, timings: rounds_pb2.Timings) -> None:
        """The step that fed its tokens is over."""
        raise NotImplementedError

    def stepped(self, step: Step) -> None:
        return

    def patience(self, working: list[SimulatedStream]) -> float:
        return 0.0


class SimulatedTarget(SimulatedEngine):
    def __init__(self, address: str, cost: Cost) -> None:
        super().__init__(address, cost)
        self._gathering = Gathering(asyncio.get_running_loop().time)

    def work_of(self, stream: SimulatedStream, request: Any) -> _Work:
        self._gathering.returned(stream, asyncio.get_running_loop().time())
        kind = request.WhichOneof("request")
        turn = getattr(request, kind).turn
        if kind == "plain":
            goes_on = stream.work is not None and stream.work.turn.round == turn.round
            if goes_on:
                assert stream.work is not None
                stream.work.until = request.plain.until
                return stream.work
        end = turn.base + len(turn.tokens)
        missing = end - min(stream.written, end - 1)
        stream.said = end
        if kind == "plain":
            return _Work(turn, missing, until=request.plain.until)
        return _Work(turn, missing + len(request.verify.draft.tokens), draft=request.verify.draft)

    def advance(self, stream: SimulatedStream, work: _Work, timings: rounds_pb2.Timings) -> None:
        accepted = 0
        if work.draft is not None:
            accepted = next(
                (i for i, token in enumerate(work.draft.tokens) if token != RIGHT), len(work.draft.tokens)
            )
        stream.written = stream.said + accepted
        stream.said += accepted + 1
        finished = stream.said >= stream.sequence.limit
        if work.until is None or stream.said >= work.until or finished:
            stream.work = None
        work.tokens, work.since = 1, asyncio.get_running_loop().time()
        if work.draft is not None and not finished:
            self._gathering.answered([stream])
        stream.answer(
            rounds_pb2.TargetReply(
                round=work.turn.round,
                accepted=range(accepted),
                tokens=[RIGHT] * (accepted + 1),
                finish_reason="length" if finished else None,
                timings=timings,
                load=rounds_pb2.Load(
                    decoding=sum(len(other.sequence.generated) > 0 for other in self._streams)
                ),
            )
        )

    def leave(self, stream: SimulatedStream) -> None:
        super().leave(stream)
        self._gathering.left(stream)

    def stepped(self, step: Step) -> None:
        self._gathering.stepped(step)

    def patience(self, working: list[SimulatedStream]) -> float:
        works = [stream.work for stream in working if stream.work is not None]
        if any(work.until is not None for work in works):
            return 0.0
        return self._gathering.patience([work.tokens for work in works])


class SimulatedDraft(SimulatedEngine):
    def __init__(self, address: str, cost: Cost, is_right: Callable[[Sequence, int], bool]) -> None:
        """is_right: whether a draft guesses the token at a position, given those before it."""
        super().__init__(address, cost)
        self._is_right = is_right

    def work_of(self, stream: SimulatedStream, request: Any) -> _Work:
        propose = request.propose
        end = propose.turn.base + len(propose.turn.tokens)
        missing = end - min(stream.written, end - 1)
        stream.said = end
        return _Work(propose.turn, missing, steps=max(propose.depth, 1), until=propose.depth)

    def advance(self, stream: SimulatedStream, work: _Work, timings: rounds_pb2.Timings) -> None:
        work.tokens = 1
        work.steps -= 1
        if work.steps:
            return
        depth = work.until or 0
        right = [self._is_right(stream.sequence, stream.said + ahead) for ahead in range(depth)]
        stream.written = stream.said + (right.index(False) if False in right else max(depth - 1, 0))
        stream.work = None
        stream.answer(
            rounds_pb2.DraftReply(
                round=work.turn.round,
                draft=rounds_pb2.Draft(
                    tokens=[RIGHT if hit else WRONG for hit in right], parents=range(-1, depth - 1)
                ),
                timings=timings,
            )
        )


class SimulatedFleet(Fleet):
    """One target and one draft worker."""

    def __init__(self, target: SimulatedTarget, draft: SimulatedDraft, hop_s: float) -> None:
        super().__init__(self._both, Trust(token="of a simulated fleet"))
        self._target, self._draft, self._hop_s = target, draft, hop_s

    def _both(self) -> Iterable[Worker]:
        return [
            Worker("target", "simulated", self._target.address, 0, "here", 2, MAX_LENGTH),
            Worker("draft", "simulated", self._draft.address, 0, "here", 2, MAX_LENGTH),
        ]

    def open_target(self, sequence: Sequence) -> Any:
        return SimulatedStream(self._target, sequence, self._hop_s)

    def open_draft(self, sequence: Sequence) -> Any:
        return SimulatedStream(self._draft, sequence, self._hop_s)


@asynccontextmanager
async def simulated_fleet(
    target: Cost, draft: Cost, hop_s: float, is_right: Callable[[Sequence, int], bool]
) -> AsyncIterator[SimulatedFleet]:
    engines = SimulatedTarget("target", target), SimulatedDraft("draft", draft, is_right)
    running = [asyncio.create_task(engine.run()) for engine in engines]
    try:
        yield SimulatedFleet(*engines, hop_s)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def is_right_at(acceptance_rate: float, sequence: Sequence, position: int) -> bool:
    """Drawn by sequence and position alone: the same for every way to draft."""
    digest = hashlib.blake2b(f"{sequence.noise_key}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) < acceptance_rate * 2**64
