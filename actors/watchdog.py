"""Ends the process of an engine if its load or one of its steps takes too long.

Time is counted in polls, not by the clock: a process that was suspended, or got no CPU time, has not hung.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from actors.engine_loop import EngineLoop
from actors.process import leave

POLL_S = 0.1


@dataclass
class Loading:
    """State of a load."""

    doing: str = ""  # current activity, for the message if the load times out


@contextmanager
def loading(load_timeout_s: float, end: Callable[[str], object]) -> Iterator[Loading]:
    """Limits the time of a block of code; beyond it, ``end`` is called in a thread, with the reason."""
    is_over, load = threading.Event(), Loading()
    arguments = is_over, load_timeout_s, load, end
    threading.Thread(target=_watch_load, args=arguments, name="watchdog of the load", daemon=True).start()
    try:
        yield load
    finally:
        is_over.set()


def watch(engine_loop: EngineLoop, step_timeout_s: float) -> None:
    """Starts a thread that watches the engine's steps, and returns at once."""
    threading.Thread(target=_watch, args=(engine_loop, step_timeout_s), name="watchdog", daemon=True).start()


def _watch_load(
    is_over: threading.Event, load_timeout_s: float, load: Loading, end: Callable[[str], object]
) -> None:
    looks = 0
    while looks * POLL_S < load_timeout_s:
        if is_over.wait(POLL_S):
            return
        looks += 1
    doing = f": {load.doing}" if load.doing else ""
    end(f"loading has taken more than load_timeout_s={load_timeout_s:g}{doing}")


def _watch(engine_loop: EngineLoop, step_timeout_s: float) -> None:
    seen, looks = None, 0
    while looks * POLL_S < step_timeout_s:
        step = engine_loop.step_under_way
        looks = looks + 1 if step is not None and step == seen else 0
        seen = step
        time.sleep(POLL_S)
    leave(f"a step has taken more than step_timeout_s={step_timeout_s:g}")
