"""The process of an engine ends itself when it hangs, loading or in a step, and not otherwise."""

import contextlib
import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import actors.watchdog
from tests.support.patience import LIMIT_S


@pytest.fixture
def reasons(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[str]:
    """Why the process would have ended."""
    given: queue.Queue[str] = queue.Queue()

    def leave(reason: str) -> None:
        given.put(reason)
        threading.Event().wait()  # the real one does not return either

    monkeypatch.setattr(actors.watchdog, "leave", leave)
    return given


class Loop(SimpleNamespace):
    """An engine loop as the watchdog sees it; every look at a step is counted."""

    looks = 0

    @property
    def step_under_way(self) -> int | None:
        self.looks += 1
        return self.step(self.looks)


def test_hanging_step_ends_the_process(reasons: queue.Queue[str]) -> None:
    loop: Any = Loop(step=lambda _: 7)
    actors.watchdog.watch(loop, 0.3)
    assert "step_timeout_s=0.3" in reasons.get(timeout=LIMIT_S)


@pytest.mark.parametrize("step", [lambda look: look // 3, lambda _: None], ids=["busy", "idle"])
def test_steps_that_end_and_none_at_all_do_not(reasons: queue.Queue[str], step) -> None:
    loop: Any = Loop()
    enough = threading.Event()

    def seen(look: int) -> int | None:
        if look == 12:
            enough.set()
        return step(look)

    loop.step = seen
    actors.watchdog.watch(loop, 0.4)
    assert enough.wait(LIMIT_S)
    assert reasons.empty()


def test_hanging_load_ends_the_process() -> None:
    reasons = queue.Queue[str]()
    with actors.watchdog.loading(0.2, reasons.put):
        assert "load_timeout_s=0.2" in reasons.get(timeout=LIMIT_S)


def test_load_that_ends_or_fails_does_not_end_the_process() -> None:
    reasons = queue.Queue[str]()
    before = {*threading.enumerate()}
    with contextlib.suppress(OSError), actors.watchdog.loading(60.0, reasons.put):
        [watchdog] = {*threading.enumerate()} - before
        raise OSError("no such checkpoint")
    watchdog.join(LIMIT_S)
    assert not watchdog.is_alive()
    assert reasons.empty()
