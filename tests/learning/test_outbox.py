"""Messages that leave together."""

import asyncio

from outrider.learning.outbox import Outbox


async def test_outbox_woken_returns_all_messages_of_a_turn() -> None:
    outbox: Outbox[int] = Outbox()
    writer = asyncio.create_task(outbox.woken())
    outbox.append(1)
    outbox.append(2)
    assert await writer == [1, 2]


async def test_outbox_wake_without_messages_returns_none_of_them() -> None:
    outbox: Outbox[int] = Outbox()
    outbox.wake()
    assert await outbox.woken() == []


async def test_outbox_woken_waits_for_the_next_message() -> None:
    outbox: Outbox[int] = Outbox()
    outbox.append(1)
    assert await outbox.woken() == [1]
    writer = asyncio.create_task(outbox.woken())
    await asyncio.sleep(0)
    assert not writer.done()
    outbox.append(2)
    assert await writer == [2]


async def test_outbox_flush_empties_it() -> None:
    outbox: Outbox[int] = Outbox()
    outbox.append(1)
    assert outbox.flush() == [1]
    assert outbox.flush() == []
