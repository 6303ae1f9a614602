"""Targets replaced in turn under streams, by deploying again with another setting: a rolling restart.

`pytest tests/cluster/failures/test_replaced_targets.py -s` prints the longest pause of a stream.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from cluster.access import TOKEN
from outrider.demo import written_out
from outrider.demo.prompts import DEMO
from tests.support.machines import Answer, Machines, body, deploy_again, deployed, plain, raylets, stream
from tests.support.patience import START_S, wait_until
from tests.support.served import SERVED

pytestmark = pytest.mark.slow

STREAMS = 4
TOKENS = 600  # tokens of an answer, which takes longer than a replaced target serves on: 10 s


def application(max_sequences: int) -> dict[str, Any]:
    """Returns a service with two targets, which are all replaced when this setting changes."""
    settings = {
        **SERVED,
        "target": str(written_out.target()),
        "target.dtype": "float32",
        "draft": str(DEMO / "draft"),
        "access.require_keys": False,
        "target.replicas": 2,
        "target.max_sequences": max_sequences,
    }
    return {
        "name": "default",
        "route_prefix": "/",
        "import_path": "cluster.app",
        "args": settings,
    }


def answers_until(ends: threading.Event, machines: Machines, request: dict[str, Any]) -> list[Answer]:
    """Asks again and again for the same answer."""
    answers = []
    while not ends.is_set():
        answers.append(stream(machines, request))
    return answers


def test_streams_whose_targets_are_all_replaced_go_on_word_for_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, "of the workers in this test")
    with (
        raylets(num_cpus=4) as cluster,
        deployed(tmp_path, cluster, application(32)) as machines,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        machines.wait_for("target", 2)
        first = machines.pids("target")
        modes: list[dict[str, Any]] = [{"mode": "off"}, {"mode": "fixed", "depth": 4}]
        length = {"max_tokens": TOKENS, "min_tokens": TOKENS}
        requests = [body(seed, speculation=modes[seed % 2], **length) for seed in range(STREAMS)]
        expected = [answer.text for answer in pool.map(partial(plain, machines), requests)]
        ends = threading.Event()
        asked = [pool.submit(answers_until, ends, machines, request) for request in requests]
        try:
            deploy_again(tmp_path, machines, [application(31)])
            wait_until(lambda: not any(map(psutil.pid_exists, first)), START_S)
            machines.wait_for("target", 2)
        finally:
            ends.set()
        told = [answers.result() for answers in asked]
    assert [{answer.text for answer in answers} for answers in told] == [{text} for text in expected]
    reports = [answer.usage["speculation"] for answers in told for answer in answers]
    pause_s = max(answer.longest_pause_s for answers in told for answer in answers)
    moves, lost = (sum(report[name] for report in reports) for name in ("moves", "lost_targets"))
    print(f"{len(reports)} answers, {moves} moved, {lost} opened again, longest pause {pause_s:.2f} s")
    assert moves > lost  # the gateway was told before the targets ended
