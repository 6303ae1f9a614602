"""Targets and drafts killed, stopped and slowed under running streams: nobody notices.

Every stream has penalties, min_tokens, logprobs and a stop string on.
"""

import contextlib
import os
import signal
from collections.abc import Iterator

import psutil  # type: ignore[import-untyped]
import pytest

from tests.support.machines import Machines, agree, body, plain, send, stream
from tests.support.patience import wait_until
from tests.support.two_machines import slowed

KEEPALIVE_S = 2.0  # after which a silent worker counts as lost


@pytest.mark.slow  # a rank that is killed takes its target along too: tests/cluster/test_tensor_parallel.py
def test_target_killed_under_a_stream(machines: Machines) -> None:
    request = body(1)
    expected = plain(machines, request)
    kill = send(signal.SIGKILL, lambda: machines.busy_pids("target"))
    answer = stream(machines, request, after=3, then=kill)
    agree(answer, expected)
    assert answer.changes_of_target == 1
    machines.wait_for("target", 2)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("process", ["frontend", "engine"])
def test_stream_of_plain_decoding_outlives_the_loss_of_all_targets(machines: Machines, process: str) -> None:
    request = body(1)
    expected = plain(machines, request)
    before = {*machines.pids("target"), *machines.engines("target")}
    pids = machines.pids if process == "frontend" else machines.engines
    kill = send(signal.SIGKILL, lambda: pids("target"))
    answer = stream(machines, {**request, "speculation": {"mode": "off"}}, after=3, then=kill)
    agree(answer, expected)
    wait_until(lambda: not any(map(psutil.pid_exists, before)))  # neither outlives the other
    machines.wait_for("target", 2)


def test_draft_killed_under_a_stream(machines: Machines) -> None:
    request = body(2)
    expected = plain(machines, request)
    answer = stream(machines, request, after=3, then=send(signal.SIGKILL, lambda: machines.pids("draft")))
    agree(answer, expected)
    assert answer.usage["speculation"]["lost_drafts"] >= 1
    machines.wait_for("draft", 1)
    again = stream(machines, body(3))
    assert again.usage["speculation"]["accepted"] > 0


@contextlib.contextmanager
def resumed(pids: list[int]) -> Iterator[None]:
    """Whatever was stopped goes on afterwards."""
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("process", ["frontend", "engine"])
@pytest.mark.parametrize("role", ["target", pytest.param("draft", marks=pytest.mark.slow)])
def test_worker_that_hangs_under_a_stream(machines: Machines, role: str, process: str) -> None:
    request = body(4)
    expected = plain(machines, request)
    stopped: list[int] = []

    def stop() -> None:
        for worker in machines.busy(role):
            stopped.append(worker["pid"] if process == "frontend" else worker["ranks"][0])
        assert stopped
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)

    with resumed(stopped):
        answer = stream(machines, request, after=3, then=stop)
    agree(answer, expected)
    assert answer.longest_pause_s < 3 * KEEPALIVE_S + expected.took_s
    machines.wait_for("target", 2)
    machines.wait_for("draft", 1)
    if process == "engine":  # Serve leaves a frontend alone that was stopped for a moment
        wait_until(lambda: not any(map(psutil.pid_exists, stopped)))


@pytest.mark.parametrize("role", ["target", "draft"])
def test_worker_that_is_ten_times_slower(machines: Machines, role: str) -> None:
    request = body(5, max_tokens=60, min_tokens=60)
    expected = plain(machines, request)
    with slowed({*machines.pids(role), *machines.engines(role)}):
        agree(stream(machines, request), expected)
