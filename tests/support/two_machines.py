"""Two raylets as two machines: gateway and targets on the first, the draft on the second."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil  # type: ignore[import-untyped]

from tests.support.machines import Machines
from tests.support.served import SERVED

MAX_REQUESTS, MAX_WAITING = 12, 4
SETTINGS = {
    "target.replicas": 2,
    "gateway.resources": {"target_side": 1},
    "target.resources": {"target_side": 1},
    "drafts.model.resources": {"draft_side": 1},
    "gateway.max_requests": MAX_REQUESTS,
    "gateway.max_waiting": MAX_WAITING,
}


@dataclass(frozen=True)
class TwoMachines(Machines):
    draft_node: Any  # Ray node


def gateways() -> list[psutil.Process]:
    """Returns the gateway processes of services that this process has started, not of other tests."""
    return _named("ServeReplica:default:gateway")


def proxies() -> list[psutil.Process]:
    """Returns the processes of Serve's proxies of services that this process has started."""
    return _named("ray::ProxyActor")


def _named(name: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(name in title for title in (process.name(), *process.cmdline()[:1])):
                found.append(process)
    return found


def application(pace: dict[str, Any]) -> dict[str, Any]:
    """Returns the application of a config file in which the gateway's user_config is ``pace``."""
    return {
        "name": "default",
        "import_path": "cluster:app",
        "args": {**SETTINGS, **SERVED, "access.require_keys": False},
        "deployments": [{"name": "gateway", "user_config": pace}],
    }


@contextlib.contextmanager
def slowed(pids: set[int], share: float = 0.9, period_s: float = 0.05) -> Iterator[None]:
    """Context in which processes are stopped for a share of every period."""
    ends = threading.Event()

    def run() -> None:
        while not ends.is_set():
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            ends.wait(share * period_s)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            time.sleep((1 - share) * period_s)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
