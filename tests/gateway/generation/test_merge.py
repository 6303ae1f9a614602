"""Several streams as one."""

import asyncio
from contextlib import aclosing

import pytest

from gateway.errors import DeadlineError
from gateway.generation.merge import merged
from tests.support.patience import LIMIT_S, eventually


async def stream(name, count, ended=None, fails=False):
    try:
        for number in range(count):
            await asyncio.sleep(0)
            yield name, number
        if fails:
            raise ValueError(name)
    finally:
        if ended is not None:
            ended.append(name)


async def test_merged_items_keep_the_order_of_their_stream():
    items = [item async for item in merged([stream("a", 5), stream("b", 0), stream("c", 9)])]
    assert len(items) == 14
    for name, count in (("a", 5), ("c", 9)):
        assert [number for which, number in items if which == name] == [*range(count)]


async def test_merged_error_of_a_stream_ends_all_streams():
    ended = []
    with pytest.raises(ValueError, match="a"):
        async for _ in merged([stream("a", 2, ended, fails=True), stream("b", 10_000, ended)]):
            pass
    assert sorted(ended) == ["a", "b"]


async def test_merged_reader_that_leaves_ends_all_streams():
    ended = []
    async with aclosing(merged([stream("a", 100, ended), stream("b", 100, ended)])) as items:
        await anext(items)
        await anext(items)
    assert sorted(ended) == ["a", "b"]


async def test_merged_reader_that_pauses_pauses_all_streams():
    produced = []

    async def counted():
        for number in range(100):
            produced.append(number)
            yield number

    async with aclosing(merged([counted()])) as items:
        await anext(items)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(produced) < 5


async def test_merged_item_not_read_until_the_deadline_ends_all_streams():
    ended = []
    deadline = asyncio.get_running_loop().time() + 0.05
    async with aclosing(merged([stream("a", 100, ended), stream("b", 100, ended)], deadline)) as items:
        await anext(items)
        await eventually(lambda: len(ended) == 2)
        with pytest.raises(DeadlineError):
            async for _ in items:
                pass


async def test_merged_stream_cancelled_from_within_is_an_error():
    async def cancelled():
        yield 1
        raise asyncio.CancelledError

    async def read():
        async for _ in merged([cancelled()]):
            pass

    with pytest.raises(RuntimeError, match="cancelled from within"):
        await asyncio.wait_for(read(), LIMIT_S)
