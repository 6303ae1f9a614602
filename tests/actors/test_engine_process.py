"""The engine's process and its frontend together."""

import os
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.engine_process import EngineProcess
from outrider.engine.errors import NoDeviceError, UnsupportedModelError
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import write_checkpoint
from tests.support.patience import LIMIT_S, wait_until


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    folder = write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")
    return EngineSettings(model=str(folder), block_size=8, cache_memory=2**22)


@pytest.fixture
def reasons() -> queue.Queue[str]:
    """Why the process has ended without being told to."""
    return queue.Queue()


@pytest.fixture
def process(settings: EngineSettings, reasons: queue.Queue[str]) -> Iterator[EngineProcess]:
    process = EngineProcess(settings, reasons.put)
    yield process
    process.join()


def test_engine_process_reports_its_load_and_ends_with_its_connection(
    process: EngineProcess, settings: EngineSettings, reasons: queue.Queue[str]
) -> None:
    ready = process.ready()
    assert ready.settings.model == settings.model
    assert ready.vocab_size > 0
    assert ready.slow_because == ()  # on a CPU
    assert {step.size.sequences for step in ready.survey[""]} >= {1, 2, 4}
    process.join()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    assert reasons.empty()


def test_engine_process_writes_debug_lines_of_the_rooms_that_its_environment_names(
    settings: EngineSettings,
    reasons: queue.Queue[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It takes steps before it serves, to know what they cost."""
    monkeypatch.setenv("OUTRIDER_DEBUG", "outrider.engine.loop")
    process = EngineProcess(settings, reasons.put)
    process.ready()
    process.join()
    written = capfd.readouterr().err
    assert "step 1: " in written
    assert "shares" not in written  # outrider.engine.cache


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("gpus", [(), ("2",), ("GPU-3f2a", "GPU-77b0")], ids=str)
def test_engine_process_sees_the_gpus_that_it_is_given_and_no_launcher_and_spins_little(
    tmp_path: Path, reasons: queue.Queue[str], monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    process = EngineProcess(EngineSettings(model=str(tmp_path)), reasons.put, gpus)
    file = Path(f"/proc/{process.pid}/environ")
    wait_until(lambda: "CUDA_VISIBLE_DEVICES=" in file.read_text())  # the program has taken the fork's place
    environment = file.read_text().split("\0")
    process.join()
    assert f"CUDA_VISIBLE_DEVICES={','.join(gpus)}" in environment
    assert not any(entry.startswith("LOCAL_RANK=") for entry in environment)
    assert any(entry.startswith("GOMP_SPINCOUNT=") for entry in environment)


def test_engine_process_that_was_given_a_gpu_and_sees_none_is_refused(
    settings: EngineSettings, reasons: queue.Queue[str]
) -> None:
    on_gpu = settings.model_copy(update={"device": "cuda"})
    process = EngineProcess(on_gpu, reasons.put, ())
    with pytest.raises(NoDeviceError, match=r"CUDA_VISIBLE_DEVICES='': torch .* sees no GPU"):
        process.ready()
    process.join()


@pytest.mark.slow
def test_engine_process_tells_its_place_before_it_is_ready(
    process: EngineProcess, settings: EngineSettings
) -> None:
    ready = process.ready()
    place = process.place
    assert (place.rank, place.pid, place.device) == (0, process.pid, "cpu")
    assert place.threads == ready.settings.threads
    assert place.may_take == place.memory > 0


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_engine_process_killed_or_stopped_is_lost(
    process: EngineProcess, reasons: queue.Queue[str], kind: signal.Signals
) -> None:
    process.ready()
    os.kill(process.pid, kind)
    assert "ended by signal 9" in reasons.get(timeout=LIMIT_S)


@pytest.mark.slow
def test_engine_process_continued_in_time_is_not_lost(
    process: EngineProcess, reasons: queue.Queue[str]
) -> None:
    process.ready()
    for _ in range(60):  # longer than one that does not go on is waited for
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.05)
        os.kill(process.pid, signal.SIGCONT)
    process.join()
    assert reasons.empty()


@pytest.mark.slow
def test_engine_process_failing_to_load_raises_in_the_frontend(
    tmp_path: Path, reasons: queue.Queue[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    process = EngineProcess(EngineSettings(model=str(tmp_path)), reasons.put)
    with pytest.raises(UnsupportedModelError):
        process.ready()
    process.join()
    assert reasons.empty()
