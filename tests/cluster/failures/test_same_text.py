"""Many requests say the same however they are drafted, also while drafts are killed."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from outrider.demo.prompts import KINDS, prompts
from tests.support.machines import Machines
from tests.support.patience import START_S
from tests.support.two_machines import MAX_REQUESTS

MODES: dict[str, dict[str, Any]] = {
    "off": {"mode": "off"},
    "auto": {"mode": "auto"},
    "fixed": {"mode": "fixed", "depth": 4},
    "n-gram": {"mode": "fixed", "depth": 4, "drafter": "ngram"},
    "mixed": {"mode": "fixed", "depth": 4, "drafter": "model+suffix"},
}


def texts(machines: Machines, speculation: dict[str, Any], count: int) -> list[str]:
    """Returns the texts of requests with mixed prompts, temperatures and seeds, several at a time."""

    def ask(number: int) -> str:
        request = {
            "prompt": prompts(KINDS[number % len(KINDS)], 48)[number % 48],
            "max_tokens": 32,
            "temperature": (0.0, 0.7, 1.0, 1.3)[number % 4],
            "top_p": (1.0, 0.9)[number % 2],
            "seed": number,
            "speculation": speculation,
        }
        response = httpx.post(f"{machines.http}/v1/completions", json=request, timeout=START_S)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(MAX_REQUESTS // 2) as pool:
        return list(pool.map(ask, range(count)))


@contextlib.contextmanager
def killed_every(seconds: float, pids: Callable[[], set[int]]) -> Iterator[list[int]]:
    killed: list[int] = []
    ends = threading.Event()

    def run() -> None:
        while not ends.wait(seconds):
            for pid in pids() - set(killed):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield killed
    finally:
        ends.set()
        thread.join()


@pytest.mark.slow
def test_requests_have_the_same_texts_however_they_are_drafted(machines: Machines) -> None:
    """A difference would have to be a near-tie; none is expected in float32."""
    expected = texts(machines, MODES["off"], 300)
    for name in ("auto", "fixed", "n-gram"):
        assert texts(machines, MODES[name], 300) == expected, name
    with killed_every(4.0, lambda: machines.pids("draft")) as killed:
        assert texts(machines, MODES["auto"], 300) == expected
        machines.wait_for("draft", 1)
        assert texts(machines, MODES["fixed"], 300) == expected
    assert killed
    machines.wait_for("draft", 1)
