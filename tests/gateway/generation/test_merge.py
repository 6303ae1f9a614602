"""Several streams as one."""

import asyncio
from contextlib import aclosing

import pytest

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


async def test_every_item_comes_in_the_order_of_its_stream():
    items = [item async for item in merged([stream("a", 5), stream("b", 0), stream("c", 9)])]
    assert len(items) == 14
    for name, count in (("a", 5), ("c", 9)):
        assert [number for which, number in items if which == name] == [*range(count)]


async def test_what_one_raises_ends_all():
    ended = []
    with pytest.raises(ValueError, match="a"):
        async for _ in merged([stream("a", 2, ended, fails=True), stream("b", 10_000, ended)]):
            pass
    assert sorted(ended) == ["a", "b"]


async def test_a_reader_that_leaves_ends_all():
    ended = []
    async with aclosing(merged([stream("a", 100, ended), stream("b", 100, ended)])) as items:
        await anext(items)
        await anext(items)
    assert sorted(ended) == ["a", "b"]


async def test_a_reader_that_pauses_pauses_them():
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


async def test_what_nobody_reads_until_the_deadline_is_closed():
    ended = []
    deadline = asyncio.get_running_loop().time() + 0.05
    async with aclosing(merged([stream("a", 100, ended), stream("b", 100, ended)], deadline)) as items:
        await anext(items)
        await eventually(lambda: len(ended) == 2)
        with pytest.raises(TimeoutError):
            async for _ in items:
                pass


async def test_a_stream_that_was_cancelled_from_within_is_not_waited_for():
    async def cancelled():
        yield 1
        raise asyncio.CancelledError

    async def read():
        async for _ in merged([cancelled()]):
            pass

    with pytest.raises(RuntimeError, match="cancelled from within"):
        await asyncio.wait_for(read(), LIMIT_S)
