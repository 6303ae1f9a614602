"""Sends many concurrent requests to a running service over gRPC, and measures what clients see."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
import numpy as np

from outrider.demo.prompts import KINDS, prompts
from protos import generation_pb2, generation_pb2_grpc

CREATIVE = "creative"  # task: stories at a temperature at which no draft guesses well
CREATIVE_TEMPERATURE = 1.5
TEMPERATURES = (0.0, 0.7)  # temperatures of all other tasks, in turn
PROMPTS = 16  # prompts per task, few enough that both workers keep them all in their caches
PRIMING_STREAMS = 16
LONGEST_STEP_S = 1.0  # longest wait for a step at the end of a slice
POLL_S = 0.01
GOLDEN = 0.618034  # golden ratio: the fractional parts of its multiples are spread evenly

RequestOf = Callable[[int, int], generation_pb2.GenerateRequest]  # arguments: number, tokens of the answer


class Arrival(NamedTuple):
    """Chunk of an answer."""

    time: float
    tokens: int
    rounds: int  # passes of the target over a Draft, counted by the origins of tokens
    passes: int


@dataclass
class StreamAnswer:
    """Request and answer as the client saw them. Times are seconds of the event loop's clock."""

    sent: float
    arrivals: list[Arrival] = field(default_factory=list)
    speculation: generation_pb2.SpeculationCounts | None = None  # None until the answer is finished
    is_open: bool = True


@dataclass(frozen=True)
class Slice:
    """Figures of one mode in one window of time."""

    rate: float  # tokens/s
    first_token_s: list[float]  # seconds to the first token, for each first token in the window
    per_token_s: list[float]  # seconds per token after the first, for each answer finished in the window
    rounds: int  # passes of the target over a Draft
    passes: int
    finished: list[generation_pb2.SpeculationCounts]  # counts of answers finished in the window


def speculation_of(mode: str) -> generation_pb2.SpeculationSettings:
    """Returns the speculation of a mode: "plain", "adaptive", or "fixed-4" for a depth of 4.

    Raises:
        ValueError: there is no such mode.
    """
    if mode in ("plain", "adaptive"):
        return generation_pb2.SpeculationSettings(mode="off" if mode == "plain" else "auto")
    name, _, depth = mode.partition("-")
    if name != "fixed" or not depth.isdecimal():
        raise ValueError(f"mode is {mode!r}; accepted: plain, adaptive, fixed-1, fixed-2, ...")
    return generation_pb2.SpeculationSettings(mode="fixed", depth=int(depth))


def request_of(tasks: Sequence[str], mode: str, number: int, tokens: int) -> generation_pb2.GenerateRequest:
    """Returns the request with this number. Tasks take turns; the number is also the seed."""
    task, turn = tasks[number % len(tasks)], number // len(tasks)
    creative = task == CREATIVE
    return generation_pb2.GenerateRequest(
        text=prompts("stories" if creative else task, PROMPTS)[turn % PROMPTS],
        task=task,
        speculation=speculation_of(mode),
        sampling=generation_pb2.Sampling(
            temperature=CREATIVE_TEMPERATURE if creative else TEMPERATURES[turn % len(TEMPERATURES)],
            max_tokens=tokens,
            ignore_eos=True,  # all answers have equal lengths in every mode
            seed=number,
        ),
    )


def arrival_of(chunk: generation_pb2.GenerateChunk, time: float) -> Arrival:
    """Returns the arrival of a chunk. Each pass yields one token of the target itself."""
    rounds = sum(origin == generation_pb2.ORIGIN_TARGET for origin in chunk.origins)
    plain = sum(origin == generation_pb2.ORIGIN_PLAIN for origin in chunk.origins)
    return Arrival(time, len(chunk.token_ids), rounds, rounds + plain)


def first_tokens(stream: int, tokens: int) -> int:
    """Returns the length of a stream's first answer. Lengths differ, so that streams do not stay in step."""
    return max(2, round(tokens * (1 - (stream * GOLDEN + 0.75) % 1)))


class LoadClient:
    """Runs concurrent streams of requests, numbered in the order in which they are sent."""

    def __init__(self, stubs: Sequence[Any], request: RequestOf, tokens: int, first: int) -> None:
        """
        Args:
            stubs: stubs of connections to the service, which the streams use in turn.
            request: returns the request with a number, for an answer with a number of tokens.
            tokens: tokens of every answer but a stream's first answer.
            first: number of the first request.
        """
        self._stubs = stubs
        self._request = request
        self._tokens = tokens
        self._numbers = itertools.count(first)
        self.answers: list[StreamAnswer] = []

    async def follow(self, seconds: float, streams: int) -> float:
        """Keeps a number of streams busy for some seconds, and returns the time of its start."""
        started = _now()
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._stream(number)) for number in range(streams)]
            await asyncio.sleep(seconds)
            await self._caught_up(started + seconds)
            for stream in running:
                stream.cancel()
        for stub in self._stubs:
            await idle(stub)
        return started

    async def _stream(self, stream: int) -> None:
        stub = self._stubs[stream % len(self._stubs)]
        await self._ask(stub, first_tokens(stream, self._tokens))
        while True:
            await self._ask(stub, self._tokens)

    async def _ask(self, stub: Any, tokens: int) -> None:
        request = self._request(next(self._numbers), tokens)
        answer = StreamAnswer(_now())
        self.answers.append(answer)
        call = stub.Generate(request)
        try:
            async for chunk in call:
                if chunk.token_ids:
                    answer.arrivals.append(arrival_of(chunk, _now()))
                if chunk.HasField("usage"):
                    answer.speculation = chunk.usage.speculation
        finally:
            answer.is_open = False
            call.cancel()

    async def _caught_up(self, end: float) -> None:
        """Waits until every stream has received the tokens of the step that was running at ``end``."""
        waited_for = [answer for answer in self.answers if answer.arrivals and answer.is_open]
        deadline = end + LONGEST_STEP_S
        while _now() < deadline and any(answer.is_open and _last(answer) < end for answer in waited_for):
            await asyncio.sleep(POLL_S)


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[Any]:
    """Yields a stub of the service at host:port, after every prompt has entered the workers' caches."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        await _prime(stub)
        yield stub


async def _prime(stub: Any) -> None:
    """Sends each prompt once, so that the first mode does not pay the prefills for all modes."""
    numbers = iter(range(PROMPTS * len(KINDS)))

    async def ask_some() -> None:
        for number in numbers:
            await stub.Complete(request_of(KINDS, "fixed-1", number, 4))

    async with asyncio.TaskGroup() as group:
        for _ in range(PRIMING_STREAMS):
            group.create_task(ask_some())


async def idle(stub: Any) -> None:
    """Waits until the gateway has released cancelled requests."""
    while True:
        loads = await stub.GetLoads(generation_pb2.GetLoadsRequest())
        if loads.running == 0:
            return
        await asyncio.sleep(POLL_S)


def slice_of(answers: Sequence[StreamAnswer], start: float, end: float) -> Slice:
    """Returns the figures of the window from ``start`` to ``end``."""
    started = [answer for answer in answers if answer.arrivals and start <= answer.arrivals[0].time < end]
    finished = [answer for answer in answers if answer.speculation and start <= _last(answer) < end]
    arrived = [arrival for answer in answers for arrival in answer.arrivals if start <= arrival.time < end]
    return Slice(
        rate_between(answers, start, end),
        [answer.arrivals[0].time - answer.sent for answer in started],
        [per_token for answer in finished for per_token in _per_token(answer)],
        sum(arrival.rounds for arrival in arrived),
        sum(arrival.passes for arrival in arrived),
        [answer.speculation for answer in finished if answer.speculation],
    )


def rate_between(answers: Sequence[StreamAnswer], start: float, end: float) -> float:
    """Returns tokens per second in a window. Tokens of a chunk are spread over the time since the last chunk.

    If tokens counted at their arrival, a window would by chance contain one step of the target more or less.
    """
    total = 0.0
    for answer in answers:
        before = answer.sent
        for arrival in answer.arrivals:
            inside = min(arrival.time, end) - max(before, start)
            if inside > 0:
                total += arrival.tokens * inside / (arrival.time - before)
            before = arrival.time
    return total / (end - start)


def _last(answer: StreamAnswer) -> float:
    return answer.arrivals[-1].time


def _per_token(answer: StreamAnswer) -> Iterator[float]:
    """Yields the mean seconds per token after the first chunk; nothing for a single chunk."""
    first, *others = answer.arrivals
    if others:
        yield (_last(answer) - first.time) / sum(arrival.tokens for arrival in others)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Returns the percentile; None without values."""
    return float(np.percentile(values, percent)) if values else None


def _now() -> float:
    return asyncio.get_running_loop().time()
