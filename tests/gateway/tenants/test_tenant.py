"""Limits of a tenant: what passes, what is refused, and what a request costs in the end."""

import pickle

import pytest

from gateway.errors import LimitReachedError, OverloadedError
from gateway.settings import GatewaySettings, TenantSettings
from gateway.tenants.tenant import FIRST_ANSWER, UNNAMED, Tenant
from gateway.tenants.tenants import MAX_LABELS, OTHER, Tenants


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def tenant_of(clock, **limits):
    return Tenant("search", TenantSettings(**limits), clock)


def claim_of(tenant, prompt_tokens=10, answers=1, max_tokens=10, priority="interactive"):
    return tenant.claim(priority, 0, prompt_tokens, answers, max_tokens)


async def ask(tenant, used=None, **asked):
    """A request from its beginning to its end. used: tokens of the answer; None: as foreseen."""
    claim = claim_of(tenant, **asked)
    async with tenant.charged(claim):
        claim.begin(waited_s=0.0)
        claim.add(round(claim.expected) - claim.prompt_tokens if used is None else used)


async def test_requests_per_minute_used_up_are_refused_until_a_part_of_the_minute_has_passed(clock):
    tenant = tenant_of(clock, requests_per_minute=2)
    for _ in range(2):
        await ask(tenant)
    with pytest.raises(
        LimitReachedError, match="requests_per_minute=2 of tenant 'search': 0 are left"
    ) as full:
        await ask(tenant)
    assert full.value.retry_after_s == pytest.approx(30.0)
    clock.now = 29.0
    with pytest.raises(LimitReachedError):
        await ask(tenant)
    clock.now = 30.5
    await ask(tenant)


async def test_tokens_per_minute_are_charged_as_foreseen_and_settled_with_what_was_used(clock):
    tenant = tenant_of(clock, tokens_per_minute=100)
    async with tenant.charged(claim := claim_of(tenant, prompt_tokens=20, max_tokens=40)):
        assert tenant.allowance.tokens.left == 40
        claim.begin(waited_s=0.0)
        claim.add(5)
    assert tenant.allowance.tokens.left == 75
    with pytest.raises(LimitReachedError, match="75 are left, and the request counts as 76") as refused:
        await ask(tenant, prompt_tokens=75, max_tokens=1)
    assert refused.value.retry_after_s == pytest.approx(0.6)
    assert tenant.allowance.tokens.left == 75  # a refused request costs nothing


async def test_tokens_of_a_request_that_never_had_a_slot_are_given_back(clock):
    tenant = tenant_of(clock, tokens_per_minute=100)
    with pytest.raises(OverloadedError):
        async with tenant.charged(claim_of(tenant)):
            raise OverloadedError("the queue is full", 1.0)
    assert tenant.allowance.tokens.left == 100
    assert tenant.counts.refusals == {"queue": 1}


async def test_request_larger_than_the_limit_passes_once_and_is_paid_off(clock):
    tenant = tenant_of(clock, tokens_per_minute=100)
    await ask(tenant, prompt_tokens=250, max_tokens=50, used=50)
    assert tenant.allowance.tokens.left == 0
    with pytest.raises(LimitReachedError) as refused:
        await ask(tenant, prompt_tokens=1, max_tokens=1)
    assert refused.value.retry_after_s == pytest.approx((200 + 2) / 100 * 60)


async def test_expected_answer_follows_the_lengths_of_earlier_answers(clock):
    tenant = tenant_of(clock)
    assert claim_of(tenant, prompt_tokens=0, answers=2, max_tokens=10**6).expected == 2 * FIRST_ANSWER
    for _ in range(200):
        await ask(tenant, used=30, max_tokens=10**6)
    assert claim_of(tenant, prompt_tokens=7, max_tokens=10**6).expected == pytest.approx(37, abs=0.1)
    assert claim_of(tenant, prompt_tokens=7, max_tokens=3).expected == 10


async def test_parallel_requests_beyond_the_limit_are_refused_until_one_ends(clock):
    tenant = tenant_of(clock, parallel_requests=1)
    refused = pytest.raises(
        LimitReachedError, match="parallel_requests=1 of tenant 'search': 1 of its requests"
    )
    async with tenant.charged(claim_of(tenant)):
        with refused:
            await ask(tenant)
    await ask(tenant)
    assert tenant.counts.refusals == {"parallel_requests": 1}


@pytest.mark.parametrize(
    ("highest", "asked", "given"),
    [
        ("interactive", "interactive", "interactive"),
        ("interactive", "batch", "batch"),
        ("batch", "interactive", "batch"),
        ("batch", "batch", "batch"),
    ],
)
def test_claim_is_no_more_urgent_than_the_tenant_may_be(clock, highest, asked, given):
    assert claim_of(tenant_of(clock, highest_priority=highest), priority=asked).priority == given


async def test_counts_tell_tokens_and_refusals(clock):
    tenant = tenant_of(clock, requests_per_minute=1)
    await ask(tenant, prompt_tokens=7, used=5)
    with pytest.raises(LimitReachedError):
        await ask(tenant)
    counts = tenant.counts
    assert (counts.requests, counts.prompt_tokens, counts.answer_tokens) == (2, 7, 5)
    assert counts.refusals == {"requests_per_minute": 1}


def test_refusal_survives_the_way_to_another_process():
    error = pickle.loads(pickle.dumps(LimitReachedError("parallel_requests", "too many", 2.5)))
    assert (error.limit, str(error), error.retry_after_s) == ("parallel_requests", "too many", 2.5)


def test_tenants_are_found_by_key_and_unknown_keys_share_the_unnamed_tenant(clock):
    settings = GatewaySettings(
        model="m",
        tokenizer="t",
        tenants={"a": TenantSettings(weight=2), "b": TenantSettings()},
        tenant_keys={"first": "a", "second": "a", "third": "b"},
    )
    tenants = Tenants(settings, clock)
    assert tenants.of("first") is tenants.of("second")
    assert (tenants.of("first").name, tenants.of("first").weight, tenants.of("third").name) == ("a", 2, "b")
    assert {tenants.of(caller).name for caller in ("fourth", "this machine", None)} == {UNNAMED}


async def test_labels_of_tenants_are_bounded(clock):
    names = [f"tenant-{number}" for number in range(MAX_LABELS + 1)]
    settings = GatewaySettings(model="m", tokenizer="t", tenants=dict.fromkeys(names, TenantSettings()))
    settings = settings.model_copy(update={"tenant_keys": {name: name for name in names}})
    tenants = Tenants(settings, clock)
    for name in names:
        await ask(tenants.of(name), prompt_tokens=3, used=2)
    counts = tenants.counts()
    assert list(counts) == [UNNAMED, *names[: MAX_LABELS - 1], OTHER]
    assert (counts[names[0]].prompt_tokens, counts[OTHER].prompt_tokens) == (3, 6)
    assert (counts[OTHER].requests, counts[OTHER].answer_tokens) == (2, 4)
