"""``serve run`` that is told to stop, by Ctrl-C or SIGTERM."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

import cluster.stop
from cluster.stop import let_requests_end
from tests.support.patience import LIMIT_S
from tests.support.running import serving
from tests.support.served import SERVED

PROGRAM = """
    import signal, sys, time
    import cluster.stop

    def let_requests_end(within_s):
        print(f"requests have {within_s}", flush=True)
        while "waits" in sys.argv:
            time.sleep(0.01)
        return 0

    cluster.stop.let_requests_end = let_requests_end
    cluster.stop.stop_in_order(7.0)
    try:
        print("runs", flush=True)  # the interrupt may come at once
        while True:
            time.sleep(1000)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def started(*arguments: str) -> "subprocess.Popen[str]":
    """The program, with Ctrl-C ignored as a shell has it for what a script starts in the background."""
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "runs\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_in_order_lets_requests_end_before_it_interrupts(number: signal.Signals) -> None:
    process = started()
    process.send_signal(number)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert (said, process.returncode) == ("requests have 7.0\ninterrupted\n", 0)


def test_stop_in_order_at_a_second_signal_waits_no_longer() -> None:
    process = started("waits")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "requests have 7.0\n"
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert (said, process.returncode) == ("interrupted\n", 0)


def test_let_requests_end_tells_the_gateways_of_every_application(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    class Handle:
        def __init__(self, deployment: str, application: str) -> None:
            self._names = deployment, application

        def broadcast(self, method: str, within_s: float) -> SimpleNamespace:
            told.append((*self._names, method, within_s))
            return SimpleNamespace(results=lambda timeout_s: [1, 2])

    there = {
        "default": SimpleNamespace(deployments=["gateway", "target"]),
        "next": SimpleNamespace(deployments=["draft-next"]),
    }
    fake = SimpleNamespace(status=lambda: SimpleNamespace(applications=there), get_deployment_handle=Handle)
    monkeypatch.setattr(cluster.stop, "serve", fake)
    assert let_requests_end(4.0) == 3
    assert told == [("gateway", "default", "leave", 4.0)]


@pytest.mark.slow
def test_sigterm_of_serve_run_ends_every_stream_with_a_last_event_and_leaves_nothing(tmp_path: Path) -> None:
    """One stream ends within its time, another is ended with an error; the exit status is 0."""
    events: dict[str, list[str]] = {}
    started = threading.Barrier(3, timeout=LIMIT_S)

    def read(name: str, max_tokens: int, url: str) -> None:
        body = {"prompt": "x", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT_S) as response:
            lines = (line for line in response.iter_lines() if line)
            events[name] = [next(lines)]
            started.wait()
            events[name] += lines

    with serving(tmp_path, {**SERVED, "gateway.stop_within_s": 3}) as service:
        readers = [
            threading.Thread(target=read, args=(name, tokens, service.http))
            for name, tokens in (("short", 64), ("long", 1900))
        ]
        for reader in readers:
            reader.start()
        started.wait()
        members = [service.process, *service.process.children(recursive=True)]
        os.kill(service.process.pid, signal.SIGTERM)
        for reader in readers:
            reader.join(LIMIT_S)
        _, alive = psutil.wait_procs(members, timeout=LIMIT_S)
    assert not alive
    assert service.process.returncode == 0
    assert [name for name, said in events.items() if said[-1] != "data: [DONE]"] == []
    assert "error" not in events["short"][-2]
    assert "error" not in events["long"][-2] or "is being stopped" in events["long"][-2]
    log = (tmp_path / "serve.log").read_text()
    assert "Aborted" not in log
    assert "*** SIGTERM" not in log
