"""Tenant at one gateway: its limits, its requests under way, and its usage."""

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gateway.errors import LimitReachedError, OverloadedError
from gateway.settings import Priority, TenantSettings
from gateway.tenants.allowance import Allowance
from gateway.tenants.shared_limits import SharedLimits
from outrider.learning.mean import Mean

UNNAMED = "unnamed"  # tenant of callers whose key has no name, and of callers without a key
FIRST_ANSWER = 256.0  # tokens; expected length of a tenant's first answer
ANSWER_MEMORY = 20.0  # answers; memory of the moving average of an answer's length
OWN = "own"  # key for the requests of this gateway
QUEUE = "queue"  # name of the gateway's own limit, in counts of refusals


@dataclass(eq=False)
class Claim:
    """Claim of one request to a permit, and the tokens that are charged to its tenant."""

    tenant: "Tenant"
    priority: Priority = "interactive"
    order: int = 0  # number among the tenant's requests of this priority; the lowest is served first
    prompt_tokens: int = 0
    answers: int = 0
    expected: float = 0.0  # expected tokens of prompt and answers together
    used: int = 0  # tokens of prompt and answers until now; 0: it has no permit yet

    def begin(self, waited_s: float) -> None:
        """Counts the prompt, now that the request has its permit."""
        self.used = self.prompt_tokens
        self.tenant.counts.prompt_tokens += self.prompt_tokens
        self.tenant.counts.queue_s += waited_s

    def add(self, tokens: int) -> None:
        """Counts committed tokens of an answer."""
        self.used += tokens
        self.tenant.counts.answer_tokens += tokens


@dataclass
class TenantCounts:
    """Counts since the gateway's start."""

    requests: int = 0  # refused requests included
    prompt_tokens: int = 0
    answer_tokens: int = 0
    queue_s: float = 0.0  # seconds that requests with a permit have waited for it
    parked: int = 0  # times that a request lost its permit for a while
    refusals: Counter[str] = field(default_factory=Counter)  # requests by the limit that refused them

    def add(self, other: "TenantCounts") -> None:
        """Adds the counts of another tenant."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.answer_tokens += other.answer_tokens
        self.queue_s += other.queue_s
        self.parked += other.parked
        self.refusals.update(other.refusals)


class Tenant:
    """Admits the requests of one tenant within its limits."""

    def __init__(
        self,
        name: str,
        settings: TenantSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            settings: limits of the tenant; None: it has no limits.
            clock: returns seconds.
        """
        settings = settings or TenantSettings()
        self.name = name
        self.weight = settings.weight
        self.served = 0.0  # tokens of requests that had a permit, divided by the weight; the queue sets it
        self.counts = TenantCounts()
        self._highest = settings.highest_priority
        self.is_limited = settings.is_limited
        self.allowance = Allowance(name, settings, clock)
        self.shared: SharedLimits | None = None  # limits of all gateways; None: this is the only gateway
        self._under_way = 0
        self._answer_tokens = Mean(FIRST_ANSWER, ANSWER_MEMORY)

    def claim(
        self, priority: Priority, order: int, prompt_tokens: int, answers: int, max_tokens: int
    ) -> Claim:
        """Returns the claim of a request, with a priority that the tenant may have."""
        expected = prompt_tokens + answers * min(self._answer_tokens.value, max_tokens)
        priority = "batch" if self._highest == "batch" else priority
        return Claim(self, priority, order, prompt_tokens, answers, expected)

    @asynccontextmanager
    async def charged(self, claim: Claim) -> AsyncIterator[None]:
        """Charges a request to the limits: the expected tokens at first, the used tokens at the end.

        Raises:
            LimitReachedError: a limit is reached; the request is charged to no limit.
        """
        self.counts.requests += 1
        self._under_way += 1
        charged = claim.expected
        try:
            await self._take(claim.expected)
            yield
        except LimitReachedError as error:
            charged = 0.0
            self.counts.refusals[error.limit] += 1
            raise
        except OverloadedError:
            self.counts.refusals[QUEUE] += 1
            raise
        finally:
            self._under_way -= 1
            difference = claim.used - charged
            self.allowance.settle(OWN, difference, self._under_way)
            if self.shared is not None:
                self.shared.settle(self.name, difference, self._under_way)
            if claim.used and claim.answers:
                self._answer_tokens.observe((claim.used - claim.prompt_tokens) / claim.answers)

    async def _take(self, tokens: float) -> None:
        """Charges a request to the limits of all gateways, or to this gateway's copy if the actor is lost."""
        told = None
        if self.shared is not None:
            told = await self.shared.take(self.name, tokens, self._under_way)
        if told is None:
            self.allowance.take(OWN, tokens, self._under_way)
            return
        refusal, levels = told
        self.allowance.use(levels)
        if refusal is not None:
            raise refusal
