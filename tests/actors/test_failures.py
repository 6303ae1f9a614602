"""What a worker's engine cannot go on with ends one stream, and draining ends all of them at once."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from actors.messages import StartEngine
from outrider.engine.forward.batch import Batch
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from protos import rounds_pb2
from tests.support.checkpoints import write_checkpoint
from tests.support.local_worker import LocalWorker, local_worker
from tests.support.messages import PROMPT, end, opening, plain, plain_text, target_stream, turn
from tests.support.model import before_passes
from tests.support.patience import eventually
from tests.support.trust import TRUST

HARMFUL = [7, 7, 7, 7, 7, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


Reached = tuple[LocalWorker, grpc.aio.Channel]


@pytest.fixture
async def reached(folder: Path) -> AsyncIterator[Reached]:
    settings = EngineSettings(model=str(folder), block_size=8, cache_memory=2**22)
    async with local_worker("target", settings) as worker, TRUST.connect(worker.address, ()) as channel:
        yield worker, channel


def harm(*args: Any, **kwargs: Any) -> Any:
    raise LookupError("with the prompt 7, 7, 7")


def in_a_step(engine: Engine) -> None:
    def harmed(batch: Batch) -> None:
        if (batch.token_ids == 7).any():
            harm()

    before_passes(engine, harmed)


def in_submitting(engine: Engine) -> None:
    submit = engine._queue.submit

    def harmed(sequence: Any, work: Any, arrived: float) -> Any:
        return harm() if list(work.tokens) == HARMFUL else submit(sequence, work, arrived)

    engine._queue.submit = harmed  # type: ignore[method-assign]


@pytest.mark.parametrize("where", [in_a_step, in_submitting])
async def test_stream_of_a_harmful_sequence_ends_alone(
    reached: Reached,
    where: Callable[[Engine], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker, channel = reached
    expected = await plain_text(channel)
    where(worker.engine)
    harmful = await target_stream(channel, opening(24, bad_token_ids=[7]))
    beside = [asyncio.create_task(plain_text(channel)) for _ in range(3)]
    with caplog.at_level(logging.ERROR):
        await harmful.write(plain(turn(1, 0, HARMFUL), len(PROMPT) + 24))
        end_of_it = await harmful.ended()
    assert end_of_it.cause == rounds_pb2.SequenceEnded.FAILED
    assert end_of_it.details == "the engine cannot go on with this sequence: LookupError in a step"
    assert "LookupError" in caplog.text
    assert await asyncio.gather(*beside) == [expected] * 3
    assert worker.behind.failure is None
    load = (await worker.client.report()).load
    assert load.free_blocks == load.total_blocks


async def test_refused_opening_ends_its_own_stream(reached: Reached, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, channel = reached
    with monkeypatch.context() as patched:
        patched.setattr(worker.engine, "open", harm)
        call = await target_stream(channel, opening())
        await call.write(plain(turn(1, 0, PROMPT), len(PROMPT) + 24))  # the engine opens it for its work
        assert (await call.ended()).cause == rounds_pb2.SequenceEnded.FAILED
    assert len(await plain_text(channel)) == 24


async def test_draining_ends_every_stream_at_once_and_says_so(
    reached: Reached,
) -> None:
    worker, channel = reached
    call = await target_stream(channel, opening(500, ignore_eos=True))
    await call.write(plain(turn(1, 0, PROMPT), len(PROMPT) + 500))
    assert (await call.read()).tokens
    idle = await target_stream(channel, opening())
    await idle.opened()
    worker.client.leave()
    late = await target_stream(channel, opening())
    for stream in (call, idle):
        assert (await stream.ended()).cause == rounds_pb2.SequenceEnded.LEAVING
        assert await stream.code() == grpc.StatusCode.OK
    assert await late.read() is None  # it was never taken
    assert await late.code() == grpc.StatusCode.OK
    await worker.client.report()
    assert not worker.engine.has_work


async def test_bytes_that_are_no_message_are_refused(reached: Reached) -> None:
    _, channel = reached
    raw: Any = channel.stream_stream("/outrider.rounds.v1.TargetWorker/Stream", None, None)
    good = await target_stream(channel, opening())
    opened = rounds_pb2.TargetWorkerRequests(requests=[rounds_pb2.TargetWorkerRequest(open=opening())])
    for begin in ([], [opened]):
        call = raw(metadata=TRUST.metadata)
        for message in begin:
            await call.write(message.SerializeToString())
        await call.write(b"um\x87%a\xc8")
        with contextlib.suppress(grpc.RpcError):
            while await call.read():
                pass
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
    await end(good)


async def test_stream_cancelled_at_its_beginning_leaves_nothing_open(
    reached: Reached,
) -> None:
    worker, channel = reached
    for number in range(300):
        call = await target_stream(channel, opening())
        for _ in range(number % 7):
            await asyncio.sleep(0)
        call.cancel()
    await eventually(lambda: worker.client.open_sequences == 0)


async def test_failing_message_ends_no_engine(reached: Reached) -> None:
    worker, channel = reached
    worker.client.send(StartEngine(worker.engine.settings, None))
    assert len(await plain_text(channel)) == 24
    assert worker.behind.failure is None


async def test_cancelled_question_takes_no_answer_from_other_questions(reached: Reached) -> None:
    worker, _ = reached
    for _ in range(50):
        asking = asyncio.create_task(worker.client.report())
        await asyncio.sleep(0)
        asking.cancel()
    assert (await worker.client.report()).load == worker.engine.load()
