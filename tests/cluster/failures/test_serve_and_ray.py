"""Serve's controller and a machine of Ray, lost under running streams."""

import signal

import psutil  # type: ignore[import-untyped]
import pytest

from tests.support.machines import Machines, agree, body, plain, send, stream
from tests.support.patience import START_S, wait_until
from tests.support.two_machines import TwoMachines, slowed


@pytest.mark.slow
def test_controller_killed_under_a_stream(machines: Machines) -> None:
    request = body(9)
    expected = plain(machines, request)
    controllers = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "ray::ServeController" in " ".join(process.info["cmdline"] or [])
    ]
    answer = stream(machines, request, after=3, then=send(signal.SIGKILL, lambda: controllers))
    agree(answer, expected)


@pytest.mark.slow  # Ray takes half a minute to notice
def test_draft_s_machine_lost_under_a_stream(machines: TwoMachines) -> None:
    """The last test of this folder: nothing brings that machine back."""
    request = body(10)
    expected = plain(machines, request)
    lose = lambda: machines.cluster.remove_node(machines.draft_node, allow_graceful=False)  # noqa: E731
    with slowed(machines.pids("target")):  # it is not at its end before the machine is gone
        answer = stream(machines, request, after=3, then=lose)
    agree(answer, expected)
    assert answer.usage["speculation"]["lost_drafts"] >= 1
    wait_until(lambda: not machines.workers("draft"), START_S)
    assert stream(machines, body(11)).usage["speculation"]["lost_drafts"] == 1
