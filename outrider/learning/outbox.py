"""Batches messages, so that there is at most one write for each iteration of the event loop."""

import asyncio
from typing import Generic, TypeVar

MessageT = TypeVar("MessageT")


class Outbox(Generic[MessageT]):
    """Queue of messages that a single writer takes all at once. Belongs to one event loop."""

    def __init__(self) -> None:
        self._messages: list[MessageT] = []
        self._is_woken = asyncio.Event()

    def append(self, message: MessageT) -> None:
        """Adds a message and wakes the writer."""
        self._messages.append(message)
        self.wake()

    def wake(self) -> None:
        """Wakes the writer even if there is no message."""
        self._is_woken.set()

    def flush(self) -> list[MessageT]:
        """Returns all messages and empties the outbox."""
        messages, self._messages = self._messages, []
        return messages

    async def woken(self) -> list[MessageT]:
        """Waits for ``append`` or ``wake``, then returns all messages and empties the outbox."""
        await self._is_woken.wait()
        self._is_woken.clear()
        return self.flush()
