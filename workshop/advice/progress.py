"""Progress messages and a time limit for long work."""

import time
from collections.abc import Callable
from math import inf

TELL_EVERY_S = 5.0


class HopelessError(Exception):
    """A candidate is given up: it takes too long on this machine, or could never pay."""


class Progress:
    """Reports progress at intervals, and raises HopelessError when a time limit is over."""

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Starts without a limit.

        clock: returns seconds.
        """
        self.tell = tell
        self._clock = clock
        self._told = clock()
        self._allowed_s = self._deadline = inf

    def allow(self, seconds: float) -> None:
        """Allows this many seconds from now on."""
        self._allowed_s = seconds
        self._deadline = self._clock() + seconds

    def at(self, done: int, of: int, what: str) -> None:
        """Reports progress if the last report is TELL_EVERY_S ago.

        Args:
            what: what is counted, such as "tokens judged".

        Raises:
            HopelessError: the time limit is over.
        """
        now = self._clock()
        if now > self._deadline:
            raise HopelessError(
                f"after {self._allowed_s:g} s {done} of {of} {what}; --candidate-seconds allows it more"
            )
        if now - self._told >= TELL_EVERY_S:
            self._told = now
            self.tell(f"{done} of {of} {what}")


SILENT = Progress(lambda _: None)
