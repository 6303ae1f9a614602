"""A bounded queue before a bounded number of places."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from gateway.errors import DeadlineError, OverloadedError
from gateway.generation.admission import LONGEST_RETRY_S, SHORTEST_RETRY_S, Admission
from tests.support.patience import LIMIT_S, eventually


def later():
    return asyncio.get_running_loop().time() + LIMIT_S


async def queued(admission, count, waiting):
    async def request():
        async with admission.slot(later()):
            pass

    tasks = [asyncio.create_task(request()) for _ in range(count)]
    await eventually(lambda: admission.waiting >= waiting)
    return tasks


async def test_place_with_a_full_queue_is_refused_with_a_delay():
    admission = Admission(max_requests=2, max_waiting=3)
    async with AsyncExitStack() as places:
        for _ in range(2):
            await places.enter_async_context(admission.slot(later()))
        tasks = await queued(admission, 3, waiting=3)
        with pytest.raises(OverloadedError, match="2 requests run and 3 wait") as refused:
            async with admission.slot(later()):
                pass
    assert SHORTEST_RETRY_S <= refused.value.retry_after_s <= LONGEST_RETRY_S
    await asyncio.gather(*tasks)  # no admitted request is refused later
    assert (admission.running, admission.waiting) == (0, 0)


async def test_place_that_is_free_needs_no_queue():
    admission = Admission(max_requests=1, max_waiting=0)
    for _ in range(3):
        async with admission.slot(later()):
            assert admission.running == 1


async def test_place_waited_for_until_the_deadline_is_refused():
    admission = Admission(max_requests=1, max_waiting=1)
    async with admission.slot(later()):
        with pytest.raises(DeadlineError):
            async with admission.slot(asyncio.get_running_loop().time()):
                pass
    assert admission.waiting == 0


async def test_place_of_a_request_that_leaves_the_queue_goes_to_the_next():
    admission = Admission(max_requests=1, max_waiting=2)
    async with admission.slot(later()):
        leaving, staying = await queued(admission, 2, waiting=2)
        leaving.cancel()
    await staying
    assert admission.running == 0


async def test_delay_grows_with_the_queue():
    admission = Admission(max_requests=1, max_waiting=100)
    async with admission.slot(later()):
        before = admission.retry_after_s()
        tasks = await queued(admission, 10, waiting=10)
        assert admission.retry_after_s() > before
    await asyncio.gather(*tasks)


async def test_place_is_free_at_the_deadline_whatever_holds_its_request_up():
    admission = Admission(max_requests=1, max_waiting=1)
    async with admission.slot(asyncio.get_running_loop().time() + 0.05):
        async with admission.slot(later()):
            assert admission.running == 1
        assert admission.running == 0
    assert admission.running == 0
    async with admission.slot(later()), AsyncExitStack() as places:  # it is given back once
        with pytest.raises(DeadlineError):
            await places.enter_async_context(admission.slot(asyncio.get_running_loop().time()))
