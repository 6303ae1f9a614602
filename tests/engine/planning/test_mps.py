"""MPS is found by its control daemon's pipe; what is left of a daemon is none."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outrider.engine.planning.mps import FOLDER, mps_runs


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path / "control"


@contextmanager
def listening(pipe: Path, kind: socket.SocketKind) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, kind) as daemon:
        daemon.bind(str(pipe))
        daemon.listen()
        yield


def test_mps_runs_without_a_pipe_is_false(pipe: Path) -> None:
    assert not mps_runs()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_mps_runs_while_its_socket_is_listened_to(pipe: Path, kind: socket.SocketKind) -> None:
    with listening(pipe, kind):
        assert mps_runs()
    assert pipe.exists()
    assert not mps_runs()


def test_mps_runs_while_its_pipe_is_read(pipe: Path) -> None:
    os.mkfifo(pipe)
    assert not mps_runs()
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert mps_runs()
    os.close(reading)
