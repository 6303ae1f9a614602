"""A tenant at one gateway: its limits, its requests under way, and what it has used."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gateway.errors import LimitReachedError, OverloadedError
from gateway.settings import Priority, TenantSettings
from gateway.tenants.bucket import Bucket
from outrider.learning.mean import Mean

UNNAMED = "unnamed"  # tenant of callers whose key has no name, and of callers without a key
FIRST_ANSWER = 256.0  # tokens; expected length of a tenant's first answer
ANSWER_MEMORY = 20.0  # answers: 1/e after these in the mean length
PARALLEL_RETRY_S = 1.0
QUEUE = "queue"  # limit of the gateway itself, in counts of refusals


@dataclass(eq=False)
class Claim:
    """Claim of one request to a permit, and the tokens that count for its tenant."""

    tenant: "Tenant"
    priority: Priority = "interactive"
    order: int = 0  # number among the tenant's requests of this priority; the lowest is served first
    prompt_tokens: int = 0
    answers: int = 0
    expected: float = 0.0  # tokens of prompt and answers together, as foreseen
    used: int = 0  # tokens of prompt and answers until now; 0: it has no permit yet

    def begin(self, waited_s: float) -> None:
        """Counts the prompt: the request has its permit."""
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
        """Counts another tenant in."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.answer_tokens += other.answer_tokens
        self.queue_s += other.queue_s
        self.parked += other.parked
        self.refusals.update(other.refusals)


class Tenant:
    """Admits the requests of one tenant as far as its limits go."""

    def __init__(
        self,
        name: str,
        settings: TenantSettings | None = None,
        gateways: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            settings: None: it has no limits.
            gateways: gateways of the service, among which the limits are divided.
            clock: seconds.
        """
        settings = settings or TenantSettings()
        self.name = name
        self.weight = settings.weight
        self.served = 0.0  # tokens divided by the weight, of requests that had a permit; the queue sets it
        self.counts = TenantCounts()
        self._highest = settings.highest_priority
        self._parallel = settings.parallel_requests
        self._most = (
            math.inf
            if settings.parallel_requests is None
            else math.ceil(settings.parallel_requests / gateways)
        )
        self._under_way = 0
        self._answer_tokens = Mean(FIRST_ANSWER, ANSWER_MEMORY)

        def bucket(limit: int | None) -> Bucket | None:
            return None if limit is None else Bucket(limit, gateways, clock)

        self.requests, self.tokens = bucket(settings.requests_per_minute), bucket(settings.tokens_per_minute)

    def claim(
        self, priority: Priority, order: int, prompt_tokens: int, answers: int, max_tokens: int
    ) -> Claim:
        """Returns the claim of a request, no more urgent than the tenant's requests may be."""
        expected = prompt_tokens + answers * min(self._answer_tokens.value, max_tokens)
        priority = "batch" if self._highest == "batch" else priority
        return Claim(self, priority, order, prompt_tokens, answers, expected)

    @contextmanager
    def charged(self, claim: Claim) -> Iterator[None]:
        """Charges a request to the limits: at first the expected tokens, in the end the used tokens.

        Raises:
            LimitReachedError: a limit is reached; the request is charged to none.
        """
        self.counts.requests += 1
        try:
            self._check(claim)
        except LimitReachedError as error:
            self.counts.refusals[error.limit] += 1
            raise
        self._under_way += 1
        self._charge(claim.expected, requests=1)
        try:
            yield
        except OverloadedError:
            self.counts.refusals[QUEUE] += 1
            raise
        finally:
            self._under_way -= 1
            self._charge(claim.used - claim.expected)
            if claim.used and claim.answers:
                self._answer_tokens.observe((claim.used - claim.prompt_tokens) / claim.answers)

    def _check(self, claim: Claim) -> None:
        if self._under_way >= self._most:
            raise LimitReachedError(
                "parallel_requests",
                f"parallel_requests={self._parallel} of tenant {self.name!r}: {self._under_way} of its "
                "requests are under way, more are not accepted",
                PARALLEL_RETRY_S,
            )
        asked = (
            ("requests_per_minute", self.requests, 1.0),
            ("tokens_per_minute", self.tokens, claim.expected),
        )
        for name, bucket, units in asked:
            if bucket is not None and (wait_s := bucket.wait_s(units)):
                raise LimitReachedError(
                    name,
                    f"{name}={bucket.limit} of tenant {self.name!r}: {bucket.left} are left, and the request "
                    f"counts as {units:.0f}; ask again in {math.ceil(wait_s)} s",
                    wait_s,
                )

    def _charge(self, tokens: float, requests: int = 0) -> None:
        if self.requests is not None:
            self.requests.give(requests)
        if self.tokens is not None:
            self.tokens.give(tokens)
