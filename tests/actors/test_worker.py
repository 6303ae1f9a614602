"""What a worker tells Serve about itself."""

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.usage import CACHE_IN_USE, SEQUENCES
from actors.worker import TargetWorker, Worker
from outrider.decoding.settings import Sampling
from outrider.engine.engine import Engine
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Generate
from tests.support.trust import TRUST

PROMPT = tuple(range(3, 35))


class Unserved(TargetWorker):
    def __del__(self) -> None:  # type: ignore[override]
        """Serve awaits the destructor; here nobody does."""


@pytest.fixture
def worker(engine: Engine) -> Iterator[Unserved]:
    yield Unserved(engine.settings, TRUST, lambda: lambda: None)
    gc.unfreeze()


def test_what_was_loaded_is_not_looked_at_again_by_the_garbage_collector(worker: Unserved) -> None:
    assert gc.get_freeze_count() > len(gc.get_objects())
    worker._engine_loop.stop()


async def test_open_sequences_and_blocks_in_use_are_what_autoscaling_sees(worker: Unserved) -> None:
    engine_loop = worker._engine_loop
    engine_loop.attach(asyncio.get_running_loop())
    assert await worker.record_autoscaling_stats() == {SEQUENCES: 0, CACHE_IN_USE: 0.0}
    opened = engine_loop.open(len(PROMPT), 1, Sampling(max_tokens=8))
    engine_loop.open(len(PROMPT), 2, Sampling(max_tokens=8))
    opened.submit(1, Generate(opened.number, 0, PROMPT, 1))
    await anext(opened.answers())
    usage = await worker.record_autoscaling_stats()
    blocks = engine_loop.engine.load().total_blocks
    assert usage == {SEQUENCES: 2, CACHE_IN_USE: 1 - (blocks - 4) / blocks}  # four blocks of eight tokens
    opened.close()
    assert await worker.record_autoscaling_stats() == {SEQUENCES: 1, CACHE_IN_USE: 0.0}
    engine_loop.stop()


async def test_a_worker_whose_engine_cannot_be_built_leaves_as_any_other(tmp_path: Path) -> None:
    """Serve calls both by name: an error of the destructor would hide that of the constructor."""
    has_ended: list[bool] = []
    worker = Unserved.__new__(Unserved)
    (tmp_path / "config.json").write_text("{}")
    settings = EngineSettings(model=str(tmp_path))
    with pytest.raises(UnsupportedModelError):
        Unserved.__init__(worker, settings, TRUST, lambda: lambda: has_ended.append(True))
    await Worker.__del__(worker)
    assert has_ended == [True]
