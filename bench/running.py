"""A service of its own for a benchmark: `serve run cluster.app` on free ports, ended by process id."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]

START_S = 180
STOP_S = 60
KILL_S = 15


class StartError(Exception):
    """The service ended, or took too long, before it was ready."""


@contextlib.contextmanager
def serving(**settings: object) -> Iterator[str]:
    """The gRPC address of a service with these settings, once it is ready; leaves no process behind.

    Raises:
        StartError: with what the service printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, address = Path(folder) / "serve.log", f"127.0.0.1:{free_port()}"
        ports = [f"http_port={free_port()}", f"grpc_port={address.partition(':')[2]}"]
        arguments = [*ports, *(f"{name}={value}" for name, value in settings.items())]
        with log.open("w") as output:
            process = subprocess.Popen(
                [str(Path(sys.executable).parent / "serve"), "run", "cluster.app", *arguments],
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "RAY_ADDRESS": "local"},
                start_new_session=True,  # Ctrl-C is for the benchmark, which then ends the service
            )
        try:
            _wait_until_announced(process, log)
            yield address
        finally:
            _end(process)


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


def _end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C would; what is left of its session after that is killed."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    _, alive = psutil.wait_procs(_in_session(process.pid), timeout=KILL_S)
    for left in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    process.wait()


def _in_session(session: int) -> list[psutil.Process]:
    """Its processes, those too whose parent has ended."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == session:
                members.append(process)
    return members
