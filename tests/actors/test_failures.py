"""What a worker's engine cannot go on with ends one stream, and draining ends all of them at once."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from actors.engine_loop import EngineLoop
from actors.servicers import TargetServicer
from actors.worker import start_server
from outrider.engine.engine import Engine
from outrider.engine.settings import EngineSettings
from protos import rounds_pb2_grpc
from protos.stream_status import FAILED, LEAVING
from tests.support.checkpoints import write_checkpoint
from tests.support.messages import PROMPT, end, opening, plain, plain_text, target_stream, turn
from tests.support.model import model_of
from tests.support.patience import eventually
from tests.support.trust import TRUST

HARMFUL = [7, 7, 7, 7, 7, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
async def worker(folder: Path) -> AsyncIterator[tuple[EngineLoop, grpc.aio.Channel]]:
    settings = EngineSettings(model=str(folder), block_size=8, cache_memory=2**22)
    engine_loop = await asyncio.to_thread(EngineLoop, lambda: Engine.from_settings(settings))
    engine_loop.attach(asyncio.get_running_loop())

    def add(server: grpc.aio.Server) -> None:
        rounds_pb2_grpc.add_TargetWorkerServicer_to_server(TargetServicer(engine_loop), server)

    server, address = await start_server(add, "127.0.0.1", TRUST)
    async with TRUST.connect(address, ()) as channel:
        yield engine_loop, channel
    await server.stop(None)
    await asyncio.to_thread(engine_loop.stop)


def harm(*args: Any, **kwargs: Any) -> Any:
    raise LookupError("with the prompt 7, 7, 7")


def in_a_step(engine: Engine) -> None:
    forward = model_of(engine).forward

    def harmed(*args: Any, **kwargs: Any) -> Any:
        return harm() if (kwargs["input_ids"] == 7).any() else forward(*args, **kwargs)

    model_of(engine).forward = harmed


def in_submitting(engine: Engine) -> None:
    submit = engine._queue.submit

    def harmed(sequence: Any, work: Any, arrived: float) -> Any:
        return harm() if list(work.tokens) == HARMFUL else submit(sequence, work, arrived)

    engine._queue.submit = harmed  # type: ignore[method-assign]


@pytest.mark.parametrize("where", [in_a_step, in_submitting])
async def test_only_the_stream_of_the_sequence_that_harms_ends(
    worker: tuple[EngineLoop, grpc.aio.Channel],
    where: Callable[[Engine], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine_loop, channel = worker
    expected = await plain_text(channel)
    where(engine_loop.engine)
    harmful = await target_stream(channel, opening(24, bad_token_ids=[7]))
    beside = [asyncio.create_task(plain_text(channel)) for _ in range(3)]
    with caplog.at_level(logging.ERROR):
        await harmful.write(plain(turn(1, 0, HARMFUL), len(PROMPT) + 24))
        assert await harmful.code() == FAILED
    assert await harmful.details() == "the engine cannot go on with this sequence: LookupError in a step"
    assert "LookupError" in caplog.text
    assert await asyncio.gather(*beside) == [expected] * 3
    assert engine_loop.failure is None
    load = await engine_loop.load()
    assert load.free_blocks == load.total_blocks


async def test_what_cannot_be_opened_ends_its_own_stream(
    worker: tuple[EngineLoop, grpc.aio.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_loop, channel = worker
    with monkeypatch.context() as patched:
        patched.setattr(engine_loop.engine, "open", harm)
        call = await target_stream(channel, opening())
        assert await call.code() == FAILED
    assert len(await plain_text(channel)) == 24


async def test_draining_ends_every_stream_at_once_and_says_so(
    worker: tuple[EngineLoop, grpc.aio.Channel],
) -> None:
    engine_loop, channel = worker
    call = await target_stream(channel, opening(500, ignore_eos=True))
    await call.write(plain(turn(1, 0, PROMPT), len(PROMPT) + 500))
    assert (await call.read()).tokens
    idle = await target_stream(channel, opening())
    await idle.initial_metadata()
    engine_loop.leave()
    with contextlib.suppress(grpc.RpcError):
        while await call.read():
            pass
    assert [await call.code(), await idle.code()] == [LEAVING, LEAVING]
    late = await target_stream(channel, opening())
    assert await late.code() == LEAVING
    assert not engine_loop.engine.has_work


async def test_bytes_that_are_no_message_are_refused(worker: tuple[EngineLoop, grpc.aio.Channel]) -> None:
    _, channel = worker
    raw: Any = channel.stream_stream("/outrider.rounds.v1.TargetWorker/Stream", None, None)
    good = await target_stream(channel, opening())
    for begin in ([], [opening()]):
        call = raw(metadata=TRUST.metadata)
        for message in begin:
            await call.write(b"\n" + bytes([message.ByteSize()]) + message.SerializeToString())
        await call.write(b"um\x87%a\xc8")
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
    await end(good)


async def test_a_stream_that_is_given_up_at_its_beginning_leaves_nothing_open(
    worker: tuple[EngineLoop, grpc.aio.Channel],
) -> None:
    engine_loop, channel = worker
    for number in range(300):
        call = await target_stream(channel, opening())
        for _ in range(number % 7):
            await asyncio.sleep(0)
        call.cancel()
    await eventually(lambda: engine_loop.open_sequences == 0)


async def test_a_command_that_fails_ends_no_engine(worker: tuple[EngineLoop, grpc.aio.Channel]) -> None:
    engine_loop, channel = worker
    engine_loop.after_each_step(harm)
    engine_loop.command(harm)
    for _ in range(50):
        asking = asyncio.create_task(engine_loop.load())
        await asyncio.sleep(0)
        asking.cancel()
    assert len(await plain_text(channel)) == 24
    assert engine_loop.failure is None
