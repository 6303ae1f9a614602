"""Messages to a worker, and short conversations with a worker."""

from collections import deque
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import Message

from outrider.engine.loop.engine import Engine
from protos import generation_pb2, rounds_pb2, rounds_pb2_grpc
from tests.support.patience import eventually
from tests.support.trust import TRUST

PROMPT = [5, 9, 17, 33, 65, 129]
KEY = 99


def opening(max_tokens: int = 24, **sampling) -> rounds_pb2.Open:
    settings = generation_pb2.Sampling(max_tokens=max_tokens, **sampling)
    return rounds_pb2.Open(prompt_length=len(PROMPT), noise_key=KEY, sampling=settings)


def turn(round: int, base: int, tokens: list[int]) -> rounds_pb2.Turn:
    return rounds_pb2.Turn(round=round, base=base, tokens=tokens)


def chain(*tokens: int) -> rounds_pb2.Draft:
    return rounds_pb2.Draft(tokens=tokens, parents=range(-1, len(tokens) - 1))


def verify(
    turn: rounds_pb2.Turn, *draft: int, sequence: int = 0, epoch: int = 0
) -> rounds_pb2.TargetWorkerRequest:
    return rounds_pb2.TargetWorkerRequest(
        sequence=sequence, epoch=epoch, decode=rounds_pb2.Decode(turn=turn, draft=chain(*draft))
    )


def plain(turn: rounds_pb2.Turn, until: int) -> rounds_pb2.TargetWorkerRequest:
    return rounds_pb2.TargetWorkerRequest(
        decode=rounds_pb2.Decode(turn=turn, lease=rounds_pb2.Lease(until=until))
    )


class Conversation:
    """Sequence over a stream of its own. Its number and epoch are 0 unless a request says otherwise."""

    def __init__(self, call: Any, requests: type[Message]) -> None:
        self._call = call
        self._requests = requests
        self._replies: deque[Any] = deque()
        self._end: rounds_pb2.SequenceEnded | None = None

    async def write(self, *requests: Message) -> None:
        """Sends requests in one message."""
        await self._call.write(self._requests(requests=requests))

    async def opened(self) -> None:
        """Waits for the worker's first message, which confirms that the sequence was opened."""
        assert (await self._call.read()).opened

    async def read(self) -> Any:
        """Returns the next reply; None after the last reply."""
        while not self._replies and self._end is None:
            told = await self._call.read()
            if not told:  # EOF
                return None
            self._replies += told.replies
            self._end = next(iter(told.ended), None)
        return self._replies.popleft() if self._replies else None

    async def told(self, sequence: int) -> Any:
        """Returns the next message with a reply to a given sequence of the stream."""
        while True:
            told = await self._call.read()
            if any(reply.sequence == sequence for reply in told.replies):
                return told

    async def ended(self) -> rounds_pb2.SequenceEnded:
        """Returns how the worker ended the sequence. Raises AssertionError if it ended the stream instead."""
        while await self.read() is not None:
            pass
        assert self._end is not None, f"{await self._call.code()}: {await self._call.details()}"
        return self._end

    async def half_close(self) -> grpc.StatusCode:
        """Half-closes the stream and returns its status."""
        await self._call.done_writing()
        return await self.code()

    async def code(self) -> grpc.StatusCode:
        """Returns the status of the stream after reading it to its end."""
        with suppress(grpc.RpcError):
            while await self._call.read():  # gRPC has no status before everything is read
                pass
        return await self._call.code()

    def cancel(self) -> None:
        self._call.cancel()


async def target_stream(channel: grpc.aio.Channel, opened: rounds_pb2.Open) -> Conversation:
    call = rounds_pb2_grpc.TargetWorkerStub(channel).Stream(metadata=TRUST.metadata)
    stream = Conversation(call, rounds_pb2.TargetWorkerRequests)
    await stream.write(rounds_pb2.TargetWorkerRequest(open=opened))
    return stream


async def draft_stream(channel: grpc.aio.Channel, opened: rounds_pb2.Open) -> Conversation:
    call = rounds_pb2_grpc.DraftWorkerStub(channel).Stream(metadata=TRUST.metadata)
    stream = Conversation(call, rounds_pb2.DraftWorkerRequests)
    await stream.write(rounds_pb2.DraftWorkerRequest(open=opened))
    return stream


async def plain_text(channel: grpc.aio.Channel, count: int = 24) -> list[int]:
    call = await target_stream(channel, opening(count))
    await call.write(plain(turn(1, 0, PROMPT), len(PROMPT) + count))
    text: list[int] = []
    while len(text) < count:
        reply = await call.read()
        text += reply.tokens
    assert reply.finish_reason == "length"
    await end(call)
    return text


async def end(call) -> None:
    await call.write(rounds_pb2.TargetWorkerRequest(close=rounds_pb2.Close()))
    assert await call.half_close() == grpc.StatusCode.OK


async def all_closed(engine: Engine) -> None:
    await eventually(lambda: not engine._sequences)
