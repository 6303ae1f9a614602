"""Parking of a request: its sequences leave their targets, and continue later with the same text."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import DeadlineError, ParkedError
from gateway.workers.fleet import TargetStream


class Parking:
    """Controls whether the sequences of one request may be at targets."""

    def __init__(self) -> None:
        self._streams: set[TargetStream] = set()
        self._may_run = asyncio.Event()
        self._may_run.set()

    def park(self) -> None:
        """Closes the streams to the targets, which free the sequences. Their loops end at the next reply."""
        self._may_run.clear()
        for stream in self._streams:
            stream.park()

    def resume(self) -> None:
        """Lets the sequences continue."""
        self._may_run.set()

    async def resumed(self, deadline: float) -> None:
        """Waits until the sequences may continue.

        Raises:
            DeadlineError: they are still parked at ``deadline``, in the event loop's time.
        """
        try:
            async with asyncio.timeout_at(deadline):
                await self._may_run.wait()
        except TimeoutError as error:
            raise DeadlineError("the request was parked until its deadline") from error

    @contextmanager
    def at(self, stream: TargetStream) -> Iterator[None]:
        """Registers a stream while a sequence is at its target. Raises ParkedError while parked."""
        if not self._may_run.is_set():
            raise ParkedError("the request is parked")
        self._streams.add(stream)
        try:
            yield
        finally:
            self._streams.remove(stream)
