"""A service of its own for a benchmark or a test: `serve run cluster.app`, ended by process id."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil  # type: ignore[import-untyped]

START_S = 180
STOP_S = 60
KILL_S = 15


class StartError(Exception):
    """The service ended, or took too long, before it was ready."""


class LeftBehindError(Exception):
    """Processes of the service outlived its Ctrl-C."""


@dataclass(frozen=True)
class Service:
    http: str  # base URL
    grpc: str  # host:port
    metrics: str  # URL of Prometheus text
    process: psutil.Process  # of `serve run`


@contextlib.contextmanager
def serving(
    folder: Path,
    *,
    ray_address: str = "local",
    environment: Mapping[str, str] = MappingProxyType({}),
    **settings: object,
) -> Iterator[Service]:
    """A service with these settings on free ports, once it is ready; leaves no process behind.

    Args:
        folder: it runs here, and leaves what it prints in serve.log.
        environment: variables that it has beside those of this process.

    Raises:
        StartError: with what the service printed.
        LeftBehindError: with the processes that had to be killed.
    """
    http_port, grpc_port, metrics_port = free_port(), free_port(), free_port()
    ports = {"http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port}
    arguments = {**ports, **settings}
    log = folder / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "serve"),
                "run",
                "cluster.app",
                *(f"{name}={value}" for name, value in arguments.items()),
            ],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, "RAY_ADDRESS": ray_address},
            start_new_session=True,  # Ctrl-C is for the caller, which then ends the service
            preexec_fn=_heed_interrupts,
        )
    try:
        parent = psutil.Process(process.pid)
        _wait_until_announced(process, log)
        yield Service(
            f"http://127.0.0.1:{http_port}",
            f"127.0.0.1:{grpc_port}",
            f"http://127.0.0.1:{metrics_port}/metrics",
            parent,
        )
    finally:
        left = end(process)
    if left:
        raise LeftBehindError(", ".join(left))


def _heed_interrupts() -> None:
    """A shell has what it starts in the background ignore them, and its children with it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _wait_until_announced(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while "A first request" not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise StartError(log.read_text())
        time.sleep(0.2)


def end(process: subprocess.Popen[bytes]) -> list[str]:
    """As Ctrl-C would; what is left of its session after that is named and killed."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    _, alive = psutil.wait_procs(_in_session(process.pid), timeout=KILL_S)
    left = [str(member) for member in alive]
    for member in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    return left


def _in_session(session: int) -> list[psutil.Process]:
    """Its processes, those too whose parent has ended."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == session:
                members.append(process)
    return members
