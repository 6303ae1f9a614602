"""Lets a task wait until a sequence has more tokens."""

import asyncio
from collections.abc import Callable
from typing import NoReturn

from gateway.events import Event, Events, TokenDecoded, VerdictReceived
from gateway.sequence import GatewaySequence


class Growth:
    """Lets one task at a time wait until the sequence has a given length."""

    def __init__(self, sequence: GatewaySequence, events: Events, pays: Callable[[], bool]) -> None:
        """pays: returns whether rounds pay now."""
        self._sequence = sequence
        self._pays = pays
        self._awaited = 0  # length that a task waits for, in tokens
        self._is_woken = asyncio.Event()
        events.add(self)

    def on(self, event: Event) -> None:
        """Wakes the task if the sequence is long enough, or if rounds pay."""
        if isinstance(event, VerdictReceived | TokenDecoded) and (
            len(self._sequence) >= self._awaited or self._pays()
        ):
            self._is_woken.set()

    async def wait_for_length(self, length: int) -> None:
        """Waits until the sequence has ``length`` tokens."""
        while len(self._sequence) < length:
            await self._next(length)

    async def wait_for_tokens(self, count: int) -> None:
        """Waits until the sequence has ``count`` more tokens, or rounds pay."""
        end = min(len(self._sequence) + count, self._sequence.limit)
        while len(self._sequence) < end and not self._pays():
            await self._next(end)

    async def _next(self, length: int) -> None:
        self._awaited = length
        self._is_woken.clear()
        await self._is_woken.wait()


async def wait_forever() -> NoReturn:
    """Waits until its task is cancelled."""
    await asyncio.Future[NoReturn]()
    raise AssertionError("nobody resolves it")
