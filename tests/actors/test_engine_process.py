"""The engine's process and its front end together."""

import os
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.engine_process import EngineProcess
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import write_checkpoint
from tests.support.patience import LIMIT_S


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


def test_it_says_what_it_has_loaded_and_ends_with_its_connection(
    process: EngineProcess, settings: EngineSettings, reasons: queue.Queue[str]
) -> None:
    ready = process.ready()
    assert ready.settings.model == settings.model
    assert ready.vocab_size > 0
    assert ready.slow_because == ()  # on a CPU
    process.join()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    assert reasons.empty()


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_is_killed_or_stopped_is_lost(
    process: EngineProcess, reasons: queue.Queue[str], kind: signal.Signals
) -> None:
    process.ready()
    os.kill(process.pid, kind)
    assert "ended by signal 9" in reasons.get(timeout=LIMIT_S)


def test_one_that_goes_on_in_time_is_not(process: EngineProcess, reasons: queue.Queue[str]) -> None:
    process.ready()
    for _ in range(60):  # longer than one that does not go on is waited for
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.05)
        os.kill(process.pid, signal.SIGCONT)
    process.join()
    assert reasons.empty()


def test_what_it_cannot_load_is_raised_here(tmp_path: Path, reasons: queue.Queue[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    process = EngineProcess(EngineSettings(model=str(tmp_path)), reasons.put)
    with pytest.raises(UnsupportedModelError):
        process.ready()
    process.join()
    assert reasons.empty()
