"""Measures the gateway's own processor time, without gRPC: `python -m bench gateway`.

Requests, loops and pace are the gateway's. A target in the same process answers at once. Counted is the
processor's time of one thread, from the bytes of the target's message to the bytes for the clients. A token
should cost the same for any number of streams, or a gateway cannot follow a target with many of them.

- plain: plain decoding, a token of each stream in a message;
- plain, late: as it is if the gateway is behind: a message has come for each of eight steps;
- pace: the pace decides, and rounds do not pay;
- rounds: Drafts of five tokens, which the target makes and continues with by itself.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from tokenizers import Tokenizer, models

from bench.report import parser_of, save, table
from gateway.api.grpc_api import _chunk
from gateway.generation.generation import Generation
from gateway.generation.request import Request
from gateway.settings import GatewaySettings, Speculation
from gateway.workers.connection import Name, StreamListener
from gateway.workers.fleet import Fleet
from gateway.workers.streams import Link, WorkerInfo
from outrider.decoding.settings import Sampling
from protos import rounds_pb2
from protos.trust import Trust

VOCABULARY, WORD = 1000, 7  # tokens, and the token that every answer consists of
PROMPT = (1, 2, 3) * 60
DEPTH = 5
LATE = 8  # steps whose messages have come if the gateway is behind
TURNS = 40  # turns of the event loop in which the gateway has done with a message
STEP_NS, DEAR_NS = 10_000_000, 2_000_000  # times of a step, and of each drafted token that does not pay
SETTINGS = GatewaySettings(
    model="m", tokenizer="t", drafts={}, target_drafters=("colocated",), drafters=("colocated",)
)
OFF = Speculation(mode="off", drafter="colocated")


@dataclass(frozen=True)
class Mode:
    """Speculation of all requests, and how the target answers."""

    speculation: Speculation
    steps: int = 1  # steps whose messages come together
    token_ns: int = 0  # nanoseconds that a drafted token adds to a step


MODES = {
    "plain": Mode(OFF),
    "plain, late": Mode(OFF, steps=LATE),
    "pace": Mode(Speculation(), token_ns=DEAR_NS),
    "rounds": Mode(Speculation(mode="fixed", depth=DEPTH)),
}


@dataclass
class _Answer:
    """Sequence at the target."""

    limit: int  # length at which it ends, tokens
    length: int = 0  # tokens
    round: int = 0
    lease: rounds_pb2.Lease | None = None  # None: the target waits for the gateway
    drafted: int = 0  # tokens of the Draft that the next step verifies


class InstantTarget:
    """Stands for the connection to a target worker, with the target."""

    is_over = False
    has_sent = True

    def __init__(self, token_ns: int) -> None:
        self._token_ns = token_ns
        self._listeners: dict[Name, StreamListener] = {}
        self._answers: dict[Name, _Answer] = {}
        self._drawn = random.Random(0)
        self._steps = 0

    def listen(self, name: Name, listener: StreamListener) -> None:
        self._listeners[name] = listener

    def forget(self, name: Name) -> None:
        self._listeners.pop(name, None)
        self._answers.pop(name, None)

    def send(self, request: rounds_pb2.TargetWorkerRequest) -> None:
        name = request.sequence, request.epoch
        match request.WhichOneof("request"):
            case "open":
                limit = request.open.prompt_length + request.open.sampling.max_tokens
                self._answers[name] = _Answer(limit)
            case "decode":
                answer, turn = self._answers[name], request.decode.turn
                answer.round, answer.lease = turn.round, request.decode.lease
                answer.length = max(answer.length, turn.base + len(turn.tokens))
                answer.drafted = len(request.decode.draft.tokens) or answer.drafted

    def step(self) -> bytes:
        """Returns the message of a step."""
        self._steps += 1
        answers = {name: answer for name, answer in self._answers.items() if answer.lease is not None}
        drafted = sum(answer.drafted for answer in answers.values())
        step = rounds_pb2.Step(
            number=self._steps,
            ns=STEP_NS + self._token_ns * drafted,
            sequences=len(answers),
            tokens=len(answers) + drafted,
        )
        replies = [self._reply(name, answer, step) for name, answer in answers.items()]
        return rounds_pb2.TargetReplies(replies=replies).SerializeToString()

    def _reply(self, name: Name, answer: _Answer, step: rounds_pb2.Step) -> rounds_pb2.TargetReply:
        assert answer.lease is not None
        room, lease = answer.limit - answer.length, answer.lease
        accepted = min(self._drawn.randint(0, answer.drafted), room - 1)
        answer.length += 1 + accepted
        depth = min(lease.depth, room - accepted - 2)
        goes_on = answer.length < lease.until and (depth > 0 or not lease.depth)
        reply = rounds_pb2.TargetReply(
            sequence=name[0],
            epoch=name[1],
            round=answer.round,
            accepted=range(accepted),
            tokens=[WORD] * (1 + accepted),
            finish_reason="length" if answer.length == answer.limit else None,
            timings=rounds_pb2.Timings(step_ns=step.ns, total_ns=step.ns, last_step=step),
            load=rounds_pb2.Load(decoding=step.sequences, running=step.sequences),
        )
        answer.drafted = max(depth, 0)
        if depth > 0:
            reply.draft.CopyFrom(rounds_pb2.Draft(tokens=[WORD] * depth, parents=range(-1, depth - 1)))
            reply.drafter, reply.continues = lease.drafter, goes_on
            reply.draft_step.CopyFrom(step)
        if not goes_on:
            answer.lease = None
        return reply

    def arrive(self, message: bytes) -> None:
        """Hands the replies of a message to their listeners, as a connection does."""
        for reply in rounds_pb2.TargetReplies.FromString(message).replies:
            if (listener := self._listeners.get((reply.sequence, reply.epoch))) is not None:
                listener.put(reply)


class Clients:
    """Closed loop of streams."""

    def __init__(self, generation: Generation, speculation: Speculation, answer_tokens: int) -> None:
        self._generation = generation
        self._speculation = speculation
        self._sampling = Sampling(temperature=0.7, max_tokens=answer_tokens, ignore_eos=True)
        self.tokens = self.chunks = 0

    async def follow(self, number: int) -> None:
        """Asks for one answer after another."""
        sampling = self._sampling.model_copy(update={"seed": number})
        request = Request(prompts=(PROMPT,), sampling=sampling, speculation=self._speculation)
        while True:
            prepared = await self._generation.prepare(request)
            async with aclosing(self._generation.chunks(prepared)) as chunks:
                async for chunk in chunks:
                    _chunk(chunk, number, None).SerializeToString()
                    self.tokens += len(chunk.tokens)
                    self.chunks += 1


async def measure(streams: int, mode: Mode, answer_tokens: int, steps: int) -> dict[str, Any]:
    """Returns microseconds of the processor for a token and for a chunk, once all answers have begun."""
    target = InstantTarget(mode.token_ns)
    info = WorkerInfo("target", "m", "127.0.0.1:1", 1, "node", VOCABULARY, 1 << 20)
    tokenizer = Tokenizer(models.WordLevel({f"w{word}": word for word in range(VOCABULARY)}, unk_token="w0"))
    with patch.object(Link, "connection", lambda _: target):
        generation = Generation(
            SETTINGS, tokenizer, Fleet(lambda: [info], Trust(token="token of a benchmark"))
        )
        clients = Clients(generation, mode.speculation, answer_tokens)
        running = [asyncio.create_task(clients.follow(number)) for number in range(streams)]
        await _turns(TURNS)
        await _take(target, steps // 4, 1)  # the costs become known to the pace
        tokens, chunks = clients.tokens, clients.chunks
        seconds = await _take(target, steps, mode.steps)
        for task in running:
            task.cancel()
        ended = await asyncio.gather(*running, return_exceptions=True)
        for error in ended:
            if not isinstance(error, asyncio.CancelledError):
                raise RuntimeError("a stream ended by itself") from error
    tokens, chunks = clients.tokens - tokens, clients.chunks - chunks
    return {
        "us a token": 1e6 * seconds / tokens,
        "us a chunk": 1e6 * seconds / chunks,
        "tokens a chunk": tokens / chunks,
    }


async def _take(target: InstantTarget, steps: int, together: int) -> float:
    """Lets the gateway work on steps, some of which come together; returns its seconds.

    Turns of an event loop without work take as long as the work of a single stream, and are left out.
    """
    seconds = 0.0
    for _ in range(-(-steps // together)):
        messages = [target.step() for _ in range(together)]
        started = time.thread_time()
        for message in messages:
            target.arrive(message)
        await _turns(TURNS)
        worked = time.thread_time()
        await _turns(TURNS)
        seconds += (worked - started) - (time.thread_time() - worked)
    return seconds


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("gateway", __doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=160)
    options = parser.parse_args(arguments)
    rows = [
        {
            "streams": streams,
            "mode": name,
            **asyncio.run(measure(streams, mode, options.answer_tokens, options.steps)),
        }
        for streams in options.streams
        for name, mode in MODES.items()
    ]
    print(table(rows))
    print(save("gateway", rows))
