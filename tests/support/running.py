"""Runs a service for a benchmark or a test: `serve run cluster.app`, ended by process id."""

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil  # type: ignore[import-untyped]

from tests.support.patience import LIMIT_S, START_S, wait_until

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PORTS = range(20_000, 32_768)  # below Linux's ephemeral ports, above some ports of Ray's workers
# Ray waits 30 s for its node. A busy machine may need longer, so the service is started once more.
RAY_TIMED_OUT = "The current node timed out during startup"
_untried_ports = iter(random.SystemRandom().sample(PORTS, len(PORTS)))


class StartError(Exception):
    """The service ended, or took too long, before it was ready."""


class LeftBehindError(Exception):
    """Processes of the service outlived its Ctrl-C."""


@dataclass(frozen=True)
class Service:
    http: str  # base URL
    grpc: str  # host:port
    direct: str  # host:port, past Serve's proxy
    metrics: str  # URL of Prometheus text
    process: psutil.Process  # process of `serve run`


@contextlib.contextmanager
def serving(
    folder: Path,
    settings: Mapping[str, object],
    *,
    ray_address: str = "local",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Service]:
    """Yields a ready service with these settings on free ports, and leaves no process behind.

    Args:
        folder: working directory of the service; its output is in serve.log.
        settings: settings by path, as on the command line.
        environment: variables in addition to the environment of this process.

    Raises:
        StartError: the service did not start; the message is its output.
        LeftBehindError: some processes had to be killed; the message names them.
    """
    http_port, grpc_port, direct_port, metrics_port = (free_port() for _ in range(4))
    ports = {
        "addresses.http_port": http_port,
        "addresses.grpc_port": grpc_port,
        "addresses.direct_grpc_port": direct_port,
        "ray.metrics_port": metrics_port,
    }
    arguments = ["cluster.app", *(f"{name}={value}" for name, value in {**ports, **settings}.items())]
    with serve_run(
        folder, arguments, ray_address, environment, lambda log: "A first request" in log
    ) as process:
        yield Service(
            f"http://127.0.0.1:{http_port}",
            f"127.0.0.1:{grpc_port}",
            f"127.0.0.1:{direct_port}",
            f"http://127.0.0.1:{metrics_port}/metrics",
            process,
        )


@contextlib.contextmanager
def serve_run(
    folder: Path,
    arguments: Sequence[str],
    ray_address: str,
    environment: Mapping[str, str],
    is_ready: Callable[[str], bool],
) -> Iterator[psutil.Process]:
    """Yields the process of ``serve run`` once ``is_ready`` accepts its output. Raises like ``serving``."""
    log = folder / "serve.log"

    def start() -> subprocess.Popen[bytes]:
        with log.open("w") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "ray.serve.scripts", "run", *arguments],
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, "RAY_ADDRESS": ray_address},
                start_new_session=True,  # Ctrl-C must reach only the caller, which then ends the service
                preexec_fn=_as_a_service,
            )

    process = start()
    try:
        _wait_until_ready(process, log, is_ready)
        if process.poll() is not None and RAY_TIMED_OUT in log.read_text():
            _end(process)
            process = start()
            _wait_until_ready(process, log, is_ready)
        if process.poll() is not None:
            raise StartError(log.read_text())
        yield psutil.Process(process.pid)
    finally:
        left = _end(process)
    if left:
        raise LeftBehindError(", ".join(left))


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, is_ready: Callable[[str], bool]) -> None:
    """Waits until the process has ended or is ready. Raises StartError."""
    try:
        wait_until(lambda: process.poll() is not None or is_ready(log.read_text()), START_S)
    except TimeoutError as late:
        raise StartError(log.read_text()) from late


def _as_a_service() -> None:
    """Restores Ctrl-C, which a shell disables for background processes and their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_this_process()


def end_with_this_process() -> None:
    """Makes the kernel send SIGTERM to a child process when its parent ends for any reason.

    Call it in the child, as ``preexec_fn``.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """Returns a free port outside of the ephemeral range, from which Ray takes ports while a service starts.

    No port is returned twice in a process: a service with one port for two listeners cannot start.
    """
    for port in _untried_ports:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port of {PORTS.start} to {PORTS.stop - 1} is left")


def _end(process: subprocess.Popen[bytes]) -> list[str]:
    """Ends a process like Ctrl-C, then kills the rest of its session. Returns what had to be killed."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LIMIT_S)
    _, alive = psutil.wait_procs(_in_session(process.pid), timeout=LIMIT_S)
    left = [str(member) for member in alive]
    for member in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    return left


def _in_session(session: int) -> list[psutil.Process]:
    """Returns the processes of a session, also processes whose parent has ended."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == session:
                members.append(process)
    return members
