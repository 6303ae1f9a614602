"""One real service for this folder: `serve run cluster.app` on free ports, ended by process id."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve's own use of pydantic is deprecated
    import ray.serve  # noqa: F401

START_S = 120
STOP_S = 60


@dataclass(frozen=True)
class Service:
    http: str  # base URL
    grpc: str  # host:port
    process: psutil.Process  # of `serve run`


@contextlib.contextmanager
def serving(folder: Path, *arguments: str, ray_address: str = "local") -> Iterator[Service]:
    """`serve run cluster.app` with these arguments, from its announcement on; leaves no process behind."""
    http_port, grpc_port = free_port(), free_port()
    command = [
        str(Path(sys.executable).parent / "serve"),
        "run",
        "cluster.app",
        f"http_port={http_port}",
        f"grpc_port={grpc_port}",
        "target_threads=1",
        f"cache_memory={2**28}",
        *arguments,
    ]
    log = folder / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "RAY_ADDRESS": ray_address},
            start_new_session=True,
        )
    parent = psutil.Process(process.pid)
    try:
        wait_until_announced(process, log)
        yield Service(f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}", parent)
    finally:
        children = parent.children(recursive=True) if parent.is_running() else []
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        left = [process_ for process_ in [parent, *children] if process_.is_running()]
        _, alive = psutil.wait_procs(left, timeout=15)
        for process_ in alive:
            process_.kill()
    assert not alive, f"left behind by Ctrl-C: {alive}"


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("elsewhere")) as service:  # the command works from any folder
        yield service


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_until_announced(process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the addresses are printed, as a person would wait."""
    deadline = time.monotonic() + START_S
    while "A first request" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


@pytest.fixture(scope="session")
def client(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.http, timeout=60) as client:
        yield client
