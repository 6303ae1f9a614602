"""Progress of long work, and its end if it takes too long."""

import time
from collections.abc import Callable
from math import inf

TELL_EVERY_S = 5.0


class HopelessError(Exception):
    """A candidate is not worth its time on this machine."""


class Progress:
    """Reports progress now and then, and ends a candidate's work after a number of seconds."""

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Starts without a limit.

        clock: seconds.
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
        """Reports ``done`` of ``what``, such as "tokens judged".
        what: is done: "tokens judged".

        Raises:
            HopelessError: its time is up.
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
