"""Order of the requests that wait: by priority, fair among tenants, in order of arrival for each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generation.fair_queue import PROMOTED_AFTER_S, FairQueue, Waiting
from gateway.settings import TenantSettings
from gateway.tenants.tenant import Claim, Tenant


class Named(Waiting):
    """Request with a name for the assertions."""

    def __init__(self, name, tenant, priority="interactive", order=0, tokens=1.0):
        super().__init__(Claim(tenant, priority, order, expected=tokens))
        self.name = name


def tenant_of(name, weight=1.0):
    return Tenant(name, TenantSettings(weight=weight))


def served(queue, now=0.0):
    return [queue.pop(now).name for _ in range(len(queue))]


def queue_of(*waiting, now=0.0):
    queue = FairQueue()
    for each in waiting:
        queue.put(each, now)
    return queue


def test_queue_of_a_single_tenant_is_served_in_order_of_arrival():
    one = tenant_of("a")
    names = list(range(20))
    assert served(queue_of(*(Named(name, one, tokens=name % 3) for name in names))) == names


def test_queue_serves_the_lowest_number_first_and_equal_numbers_by_arrival():
    one = tenant_of("a")
    orders = {"x": 3, "first": -1, "second": -1, "last": 2**62, "y": 3}
    queue = queue_of(*(Named(name, one, order=order) for name, order in orders.items()))
    assert served(queue) == ["first", "second", "x", "y", "last"]


def test_queue_serves_interactive_requests_before_batch_requests_of_any_tenant():
    busy, idle = tenant_of("busy"), tenant_of("idle")
    busy.served = 1e6
    queue = queue_of(Named("batch", idle, "batch", order=-5), Named("interactive", busy))
    assert served(queue) == ["interactive", "batch"]


def test_queue_numbers_of_a_tenant_do_not_pass_another_tenant():
    pushy, modest = tenant_of("pushy"), tenant_of("modest")
    pushy.served = 1.0
    queue = queue_of(Named("pushy", pushy, order=-100), Named("modest", modest))
    modest.served = 0.0  # it waited all the time
    assert served(queue) == ["modest", "pushy"]


def test_queue_batch_request_that_has_waited_long_counts_as_interactive():
    one = tenant_of("a")
    queue = queue_of(Named("batch", one, "batch", order=7))
    queue.put(Named("interactive", one), PROMOTED_AFTER_S)
    assert served(queue, PROMOTED_AFTER_S) == ["interactive", "batch"]
    queue = queue_of(Named("batch", one, "batch", order=7))
    queue.put(Named("interactive", one), PROMOTED_AFTER_S)
    assert served(queue, PROMOTED_AFTER_S + 1) == ["batch", "interactive"]


def test_queue_tenant_that_returns_has_saved_up_nothing():
    steady, returning = tenant_of("steady"), tenant_of("returning")
    queue = queue_of(*(Named("steady", steady) for _ in range(100)))
    for _ in range(50):
        queue.pop(0.0)
    for _ in range(50):
        queue.put(Named("returning", returning), 0.0)
    assert served(queue)[:20].count("returning") == pytest.approx(10, abs=1)


def test_queue_tenant_that_returns_to_an_empty_queue_has_saved_up_nothing():
    steady, returning = tenant_of("steady"), tenant_of("returning")
    served(queue := queue_of(*(Named("steady", steady) for _ in range(50))))
    queue.put(Named("returning", returning), 0.0)
    assert returning.served == steady.served == 50


def test_queue_request_that_left_is_not_served():
    one = tenant_of("a")
    queue = queue_of(first := Named("first", one), Named("second", one))
    assert queue.remove(first)
    assert not queue.remove(first)
    assert served(queue) == ["second"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(1.0, 100.0)), max_size=60),
    st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=3, max_size=3),
)
def test_queue_tenants_that_wait_get_tokens_by_weight_up_to_one_request(requests, weights):
    """The bound of virtual token counters: their gap is at most the largest request by its weight."""
    tenants = {name: tenant_of(name, weight) for name, weight in zip("abc", weights, strict=True)}
    queue = queue_of(*(Named(name, tenants[name], tokens=tokens) for name, tokens in requests))
    largest = max((tokens / tenants[name].weight for name, tokens in requests), default=0.0)
    while queue:
        waiting = {each.claim.tenant for each in queue}
        counters = [tenant.served for tenant in waiting]
        assert max(counters) - min(counters) <= largest + 1e-6
        queue.pop(0.0)
