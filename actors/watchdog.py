"""Ends a worker's process once its engine has failed, or a step of it goes on for too long."""

import threading
import time

from actors.engine_loop import EngineLoop
from actors.leaving import leave

POLL_S = 0.1


def watch(engine_loop: EngineLoop, step_timeout_s: float) -> None:
    """Returns at once; a thread looks after it from then on.

    A step is given its time by looks at it, not by the clock: a process that was stopped as a whole, or got
    no processor, has not hung.
    """
    threading.Thread(target=_watch, args=(engine_loop, step_timeout_s), name="watchdog", daemon=True).start()


def _watch(engine_loop: EngineLoop, step_timeout_s: float) -> None:
    seen, looks = None, 0
    while looks * POLL_S < step_timeout_s:
        if engine_loop.failure is not None:
            leave(f"the engine failed: {engine_loop.failure!r}")
        step = engine_loop.step_under_way
        looks = looks + 1 if step is not None and step == seen else 0
        seen = step
        time.sleep(POLL_S)
    leave(f"a step has taken more than step_timeout_s={step_timeout_s:g}")
