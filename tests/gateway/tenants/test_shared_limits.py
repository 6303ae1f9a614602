"""Limits of a tenant whose requests reach several gateways: each can give all of them, together no more."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from ray.exceptions import RayError

from gateway.errors import LimitReachedError
from gateway.settings import GatewaySettings, TenantSettings
from gateway.tenants import shared_limits
from gateway.tenants.shared_limits import SILENT_S, AllLimits, SharedLimits
from gateway.tenants.tenants import Tenants
from tests.support.patience import eventually


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Actor:
    """Handle of an actor, which runs in this process."""

    def __init__(self, limits):
        self._limits = limits
        self.is_lost = False

    def __getattr__(self, method):
        return Method(self, getattr(self._limits, method))


class Method:
    def __init__(self, actor, method):
        self._actor = actor
        self._method = method

    def remote(self, *given):
        return asyncio.shield(asyncio.ensure_future(self._answer(*given)))

    async def _answer(self, *given):
        if self._actor.is_lost:
            raise RayError("the actor is lost")
        return await self._method(*given)


class Service:
    """Several gateways, each with its own copy of the tenant ``search``."""

    def __init__(self, gateways, **limits):
        self.clock = Clock()
        own = {"search": TenantSettings(**limits), "free": TenantSettings()}
        self.actor = Actor(AllLimits(own, self.clock))
        self.shared = [SharedLimits(lambda: self.actor) for _ in range(gateways)]
        settings = GatewaySettings(
            model="m", tokenizer="t", tenants=own, tenant_keys={name: name for name in own}
        )
        gateways_tenants = [Tenants(settings, self.clock) for _ in self.shared]
        for tenants, shared in zip(gateways_tenants, self.shared, strict=True):
            tenants.share(shared)
        self.tenants = [tenants.of("search") for tenants in gateways_tenants]
        self.free = gateways_tenants[0].of("free")

    def charged(self, gateway, tokens=1):
        """Returns a request at a gateway, for as long as it runs; it uses as many tokens as foreseen."""
        tenant = self.tenants[gateway]
        return tenant.charged(tenant.claim("interactive", 0, tokens, 0, 1))

    async def ask(self, gateway, tokens=1, used=None):
        """Asks from beginning to end. used: tokens in the end; None: as foreseen."""
        tenant = self.tenants[gateway]
        claim = tenant.claim("interactive", 0, tokens, 0, 1)
        async with tenant.charged(claim):
            claim.used = tokens if used is None else used

    async def passes(self, gateway, times):
        """Returns how many of a number of requests pass."""
        passed = 0
        for _ in range(times):
            try:
                await self.ask(gateway)
            except LimitReachedError:
                continue
            passed += 1
        return passed


@pytest.fixture
async def service_of():
    services = []

    def make(gateways=2, **limits):
        services.append(Service(gateways, **limits))
        return services[-1]

    yield make
    for service in services:
        for shared in service.shared:
            shared.close()


async def test_caller_at_a_single_gateway_gets_all_of_a_limit(service_of):
    service = service_of(requests_per_minute=120)
    assert await service.passes(0, 121) == 120
    for _ in range(10):  # two requests a second, as the limit says
        service.clock.now += 1.0
        assert await service.passes(0, 3) == 2


@pytest.mark.parametrize("gateways", [2, 5])
async def test_gateways_together_give_no_more_than_the_limit(service_of, gateways):
    service = service_of(gateways, requests_per_minute=10)
    assert sum([await service.passes(number, 10) for number in range(gateways)]) == 10
    refused = pytest.raises(LimitReachedError, match="requests_per_minute=10 of tenant 'search': 0 are left")
    with refused as error:
        await service.ask(1)
    assert error.value.retry_after_s == pytest.approx(6.0)
    assert service.tenants[1].counts.refusals["requests_per_minute"] > 0


async def test_requests_that_come_at_once_at_all_gateways_pass_as_far_as_the_limit_goes(service_of):
    service = service_of(parallel_requests=3)
    async with AsyncExitStack() as under_way:
        asked = [under_way.enter_async_context(service.charged(number % 2)) for number in range(8)]
        told = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(each, LimitReachedError) for each in told) == 5
    assert await service.passes(1, 3) == 3


async def test_tokens_are_settled_for_all_gateways(service_of):
    service = service_of(tokens_per_minute=100)
    await service.ask(0, tokens=80, used=30)
    await service.ask(1, tokens=60)
    assert [tenant.allowance.tokens.left for tenant in service.tenants] == [70, 10]
    with pytest.raises(LimitReachedError, match="10 are left, and the request counts as 20"):
        await service.ask(0, tokens=20)
    assert service.tenants[0].allowance.tokens.left == 10  # as headers tell it


async def test_cancelled_request_costs_nothing(service_of):
    service = service_of(tokens_per_minute=100, parallel_requests=1)
    asking = asyncio.create_task(service.ask(0, tokens=100))
    await asyncio.sleep(0)  # the actor is asked, and has not answered
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await service.ask(1, tokens=100)


async def test_requests_of_a_lost_gateway_count_until_it_has_been_silent(service_of):
    service = service_of(parallel_requests=1)
    async with service.charged(0):
        service.shared[0].close()
        service.clock.now = SILENT_S - 0.1
        assert await service.passes(1, 1) == 0
        service.clock.now = SILENT_S + 0.1
        assert await service.passes(1, 1) == 1


async def test_requests_of_a_gateway_that_says_it_is_there_go_on_counting(service_of, monkeypatch):
    monkeypatch.setattr(shared_limits, "HEARTBEAT_S", 0.01)
    service = service_of(parallel_requests=1)
    heard = service.actor._limits._last_seen
    async with service.charged(0):
        for now in (SILENT_S - 0.1, 2 * SILENT_S - 0.2):
            service.clock.now = now
            await eventually(lambda: now in heard.values())  # noqa: B023
        assert await service.passes(1, 1) == 0
    assert await service.passes(1, 1) == 1


async def test_gateways_go_on_by_themselves_while_the_limits_are_lost(service_of, monkeypatch):
    monkeypatch.setattr(shared_limits, "AWAY_S", 0.0)
    service = service_of(requests_per_minute=10)
    assert await service.passes(0, 4) == 4
    assert await service.passes(1, 1) == 1
    service.actor.is_lost = True
    assert await service.passes(1, 10) == 5  # it knows of the five requests before
    service.actor = Actor(AllLimits({"search": TenantSettings(requests_per_minute=10)}, service.clock))
    assert await service.passes(0, 1) == 1  # it notices the loss
    assert await service.passes(0, 11) == 10


async def test_gateway_asks_no_lost_actor_for_a_while(service_of):
    service = service_of(requests_per_minute=10)
    service.actor.is_lost = True
    await service.ask(0)
    service.actor.is_lost = False
    assert await service.passes(0, 10) == 9


async def test_tenant_without_a_limit_asks_nobody(service_of):
    service = service_of(requests_per_minute=1)
    service.actor = None
    async with service.free.charged(service.free.claim("interactive", 0, 1, 0, 1)):
        pass
