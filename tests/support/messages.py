"""Messages to a worker, and short conversations with one."""

import grpc

from outrider.engine.engine import Engine
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


def verify(turn: rounds_pb2.Turn, *draft: int, sequence: int = 0, epoch: int = 0) -> rounds_pb2.TargetRequest:
    return rounds_pb2.TargetRequest(
        sequence=sequence, epoch=epoch, verify=rounds_pb2.Verify(turn=turn, draft=chain(*draft))
    )


def extend(turn: rounds_pb2.Turn, *draft: int) -> rounds_pb2.TargetRequest:
    return rounds_pb2.TargetRequest(extend=rounds_pb2.Extend(turn=turn, draft=chain(*draft)))


def plain(turn: rounds_pb2.Turn, until: int) -> rounds_pb2.TargetRequest:
    return rounds_pb2.TargetRequest(plain=rounds_pb2.Plain(turn=turn, until=until))


def top_up(turn: rounds_pb2.Turn, until: int) -> rounds_pb2.TargetRequest:
    return rounds_pb2.TargetRequest(top_up=rounds_pb2.TopUp(turn=turn, until=until))


async def target_stream(channel: grpc.aio.Channel, opened: rounds_pb2.Open):
    call = rounds_pb2_grpc.TargetWorkerStub(channel).Stream(metadata=TRUST.metadata)
    await call.write(rounds_pb2.TargetRequest(open=opened))
    return call


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
    await call.write(rounds_pb2.TargetRequest(close=rounds_pb2.Close()))
    assert await call.code() == grpc.StatusCode.OK


async def all_closed(engine: Engine) -> None:
    await eventually(lambda: not engine._sequences)
