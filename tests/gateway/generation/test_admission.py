"""A bounded queue before a bounded number of places."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from gateway.errors import DeadlineError, OverloadedError, WorkerLostError
from gateway.generation.admission import LONGEST_RETRY_S, SHORTEST_RETRY_S, Admission
from gateway.tenants.tenant import Claim, Tenant
from tests.support.patience import LIMIT_S, eventually


def later():
    return asyncio.get_running_loop().time() + LIMIT_S


async def queued(admission, count, waiting):
    async def request():
        async with admission.permit(later()):
            pass

    tasks = [asyncio.create_task(request()) for _ in range(count)]
    await eventually(lambda: admission.waiting >= waiting)
    return tasks


async def test_place_with_a_full_queue_is_refused_with_a_delay():
    admission = Admission(max_requests=2, max_waiting=3)
    async with AsyncExitStack() as places:
        for _ in range(2):
            await places.enter_async_context(admission.permit(later()))
        tasks = await queued(admission, 3, waiting=3)
        with pytest.raises(OverloadedError, match="2 requests run and 3 wait") as refused:
            async with admission.permit(later()):
                pass
    assert SHORTEST_RETRY_S <= refused.value.retry_after_s <= LONGEST_RETRY_S
    await asyncio.gather(*tasks)  # no admitted request is refused later
    assert (admission.running, admission.waiting) == (0, 0)


async def test_place_with_a_queue_full_of_batch_requests_is_left_to_an_interactive_request():
    admission, tenant = Admission(max_requests=1, max_waiting=1), Tenant("t")
    batch, interactive = Claim(tenant, priority="batch"), Claim(tenant, priority="interactive")

    async def asked(claim):
        async with admission.permit(later(), claim):
            pass

    async with admission.permit(later()):
        waiting = [asyncio.create_task(asked(batch))]
        await eventually(lambda: admission.waiting == 1)
        with pytest.raises(OverloadedError, match="1 wait"):
            await asked(batch)
        waiting.append(asyncio.create_task(asked(interactive)))
        await eventually(lambda: admission.waiting == 2)
        with pytest.raises(OverloadedError, match="1 wait"):
            await asked(interactive)
        with pytest.raises(OverloadedError, match="2 wait"):
            await asked(batch)
    await asyncio.gather(*waiting)


async def test_place_that_is_free_needs_no_queue():
    admission = Admission(max_requests=1, max_waiting=0)
    for _ in range(3):
        async with admission.permit(later()):
            assert admission.running == 1


async def test_place_waited_for_until_the_deadline_is_refused():
    admission = Admission(max_requests=1, max_waiting=1)
    async with admission.permit(later()):
        with pytest.raises(DeadlineError):
            async with admission.permit(asyncio.get_running_loop().time()):
                pass
    assert admission.waiting == 0


async def test_place_of_a_request_that_leaves_the_queue_goes_to_the_next():
    admission = Admission(max_requests=1, max_waiting=2)
    async with admission.permit(later()):
        leaving, staying = await queued(admission, 2, waiting=2)
        leaving.cancel()
    await staying
    assert admission.running == 0


async def test_delay_grows_with_the_queue():
    admission = Admission(max_requests=1, max_waiting=100)
    async with admission.permit(later()):
        before = admission.retry_after_s()
        tasks = await queued(admission, 10, waiting=10)
        assert admission.retry_after_s() > before
    await asyncio.gather(*tasks)


async def test_place_is_free_at_the_deadline_whatever_holds_its_request_up():
    admission = Admission(max_requests=1, max_waiting=1)
    async with admission.permit(asyncio.get_running_loop().time() + 0.05):
        async with admission.permit(later()):
            assert admission.running == 1
        assert admission.running == 0
    assert admission.running == 0
    async with admission.permit(later()), AsyncExitStack() as places:  # it is given back once
        with pytest.raises(DeadlineError):
            await places.enter_async_context(admission.permit(asyncio.get_running_loop().time()))


async def admitted_in_order(admission, claims, first=None):
    """Numbers of the claims in the order in which they got a permit, while the first claim held it."""
    order = []

    async def request(number, claim):
        async with admission.permit(later(), claim):
            order.append(number)

    async with admission.permit(later(), first) as permit:
        tasks = [asyncio.create_task(request(*each)) for each in enumerate(claims)]
        await eventually(lambda: admission.waiting == len(claims))
        admission.count(permit, 6)
    await asyncio.gather(*tasks)
    return order


async def test_place_goes_to_interactive_requests_first_and_to_the_lowest_number():
    tenant = Tenant("a")
    claims = [Claim(tenant, "batch"), Claim(tenant, order=3), Claim(tenant), Claim(tenant, order=-1)]
    assert await admitted_in_order(Admission(1, 9), claims) == [3, 2, 1, 0]


async def test_place_goes_to_the_tenant_that_was_served_less_by_what_it_used():
    """The first request of "a" used less than was foreseen, so its second comes before that of "b"."""
    a, b = Tenant("a"), Tenant("b")
    admission = Admission(max_requests=1, max_waiting=9)
    first = Claim(a, prompt_tokens=4, expected=100.0)
    order = await admitted_in_order(admission, [Claim(b, expected=1.0), Claim(a, expected=1.0)], first)
    assert order == [1, 0]
    assert (a.served, b.served) == (10, 100)  # with what their second requests used: nothing


async def test_queue_closed_while_requests_wait_refuses_them_and_becomes_idle():
    admission = Admission(max_requests=1, max_waiting=2)
    async with admission.permit(later()):
        tasks = await queued(admission, 2, waiting=2)
        admission.close()
        refused = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in refused] == [WorkerLostError, WorkerLostError]
    async with asyncio.timeout(LIMIT_S):
        await admission.idle()
    with pytest.raises(WorkerLostError):
        async with admission.permit(later()):
            pass


async def test_queue_whose_only_request_leaves_as_it_is_served_becomes_idle():
    admission = Admission(max_requests=1, max_waiting=1)
    async with admission.permit(later()):
        (task,) = await queued(admission, 1, waiting=1)
        task.cancel()
    async with asyncio.timeout(LIMIT_S):
        await admission.idle()
    assert admission.under_way == 0
