"""Waiting for one sequence to have more tokens."""

import asyncio
from collections.abc import Callable

from gateway.sequence import GatewaySequence


class Growth:
    """One waits at a time, and is woken for no fewer tokens than it waits for, unless rounds pay."""

    def __init__(self, sequence: GatewaySequence) -> None:
        self._sequence = sequence
        self._grew = asyncio.Event()
        self._awaited = 0  # length of the sequence that somebody waits for

    def grew(self, pays: Callable[[], bool]) -> None:
        """The sequence has more tokens."""
        if len(self._sequence) >= self._awaited or pays():
            self._grew.set()

    async def to(self, length: int) -> None:
        """Until there are at least so many tokens."""
        while len(self._sequence) < length:
            await self._next(length)

    async def by(self, count: int, pays: Callable[[], bool]) -> None:
        """Until there are so many tokens more, or rounds pay."""
        end = min(len(self._sequence) + count, self._sequence.limit)
        while len(self._sequence) < end and not pays():
            await self._next(end)

    async def _next(self, length: int) -> None:
        self._awaited = length
        self._grew.clear()
        await self._grew.wait()
