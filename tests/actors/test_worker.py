"""What a worker tells Serve about itself."""

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

import actors.worker
from actors.engine_client import EngineClient
from actors.messages import EngineAnswer
from actors.metrics import CACHE_IN_USE, FIRST_TOKEN, SEQUENCES
from actors.worker import TargetWorker, Worker
from gateway.workers.streams import WorkerInfo as Published
from outrider.decoding.settings import Sampling
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.settings import EngineSettings
from outrider.engine.work import plain_decoding
from outrider.receipts.digests import tokenizer_digest, weights_digest
from outrider.telemetry.instruments import Instruments
from tests.support.checkpoints import write_checkpoint
from tests.support.instruments import Told
from tests.support.patience import eventually
from tests.support.trust import TRUST

PROMPT = tuple(range(3, 35))


class Unserved(TargetWorker):
    def __del__(self) -> None:  # type: ignore[override]
        """Serve awaits the destructor; here nobody does."""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Unserved]:
    settings = EngineSettings(
        model=str(write_checkpoint(tmp_path / "llama", "llama")), block_size=8, cache_memory=2**22
    )
    worker = Unserved(settings, TRUST, lambda: lambda: None)
    yield worker
    worker._engine.join()
    gc.unfreeze()


@pytest.mark.slow
def test_loaded_objects_are_frozen_out_of_garbage_collection(worker: Unserved) -> None:
    assert gc.get_freeze_count() > len(gc.get_objects())


@pytest.mark.slow
async def test_open_sequences_and_blocks_in_use_are_what_autoscaling_sees(worker: Unserved) -> None:
    worker._client = client = EngineClient()
    await client.connect(worker._engine.connection)
    assert await worker.record_autoscaling_stats() == {SEQUENCES: 0, CACHE_IN_USE: 0.0, FIRST_TOKEN: 0.0}
    heard: asyncio.Queue[object] = asyncio.Queue()
    number = client.open(len(PROMPT), 1, Sampling(max_tokens=8), heard.put_nowait)
    client.open(len(PROMPT), 2, Sampling(max_tokens=8), heard.put_nowait)
    client.submit(1, plain_decoding(number, 0, PROMPT, 1))
    assert isinstance(await heard.get(), EngineAnswer)
    usage = await worker.record_autoscaling_stats()
    blocks = (await client.report()).load.total_blocks
    in_use = 1 - (blocks - 4) / blocks  # four blocks of eight tokens
    assert usage == {SEQUENCES: 2, CACHE_IN_USE: in_use, FIRST_TOKEN: 0.0}
    client.close(number)
    assert await worker.record_autoscaling_stats() == {SEQUENCES: 1, CACHE_IN_USE: 0.0, FIRST_TOKEN: 0.0}
    await client.stop()


@pytest.mark.slow
async def test_reasons_of_a_slow_gpu_engine_are_published(
    worker: Unserved, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    monkeypatch.setattr(actors.worker, "ray", SimpleNamespace(util=there))
    monkeypatch.setattr(actors.worker, "node_here", lambda: "node")  # Ray's own would start a cluster
    told = Told()
    monkeypatch.setattr(actors.worker, "Instruments", lambda metrics: Instruments(metrics, told.instrument))
    on_gpu = worker._ready.settings.model_copy(update={"device": "cuda:0"})
    worker._ready = structs.replace(worker._ready, settings=on_gpu, slow_because=("Triton is missing",))
    published = Published(**await worker.record_replica_metadata())
    assert published.slow_because == ("Triton is missing",)
    heard: asyncio.Queue[object] = asyncio.Queue()
    number = worker._client.open(len(PROMPT), 1, Sampling(max_tokens=8), heard.put_nowait)
    worker._client.submit(1, plain_decoding(number, 0, PROMPT, 1))
    await eventually(lambda: told.values["outrider_gpu_steps", "kernels"] == 1)
    await Worker.__del__(worker)


@pytest.mark.slow
async def test_reconfigure_of_a_worker_refuses_live_settings_and_goes_on(
    worker: Unserved, caplog: pytest.LogCaptureFixture
) -> None:
    """Serve calls it by name, and ends a replica that has no such method or raises."""
    worker.reconfigure({"max_depth": 2})
    assert "user_config={'max_depth': 2} has no effect on a target worker" in caplog.text
    await Worker.__del__(worker)


async def test_worker_without_an_engine_leaves_in_order(tmp_path: Path) -> None:
    """Serve calls both by name: an error of the destructor would hide that of the constructor."""
    has_ended: list[bool] = []
    worker = Unserved.__new__(Unserved)
    (tmp_path / "config.json").write_text("{}")
    settings = EngineSettings(model=str(tmp_path))
    with pytest.raises(UnsupportedModelError):
        Unserved.__init__(worker, settings, TRUST, lambda: lambda: has_ended.append(True))
    await Worker.__del__(worker)
    assert has_ended == [True]


async def test_target_worker_with_receipts_publishes_the_digests_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(self: Worker) -> dict[str, str]:
        return {}

    monkeypatch.setattr(Worker, "__init__", lambda *_: None)
    monkeypatch.setattr(Worker, "record_replica_metadata", nothing)
    folder = write_checkpoint(tmp_path / "llama", "llama")
    (folder / "tokenizer.json").write_text("{}")
    settings = EngineSettings(model=str(folder))
    silent, telling = (Unserved(settings, TRUST, lambda: lambda: None, told) for told in (False, True))
    assert await silent.record_replica_metadata() == {}
    digests = {"weights": weights_digest(str(folder)), "tokenizer": tokenizer_digest(str(folder))}
    assert await telling.record_replica_metadata() == digests
