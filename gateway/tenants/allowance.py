"""Remaining allowance of a tenant."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from gateway.errors import LimitReachedError
from gateway.settings import TenantSettings
from gateway.tenants.bucket import Bucket

PARALLEL_RETRY_S = 1.0
ELSEWHERE = "elsewhere"  # key for the requests of all other gateways


@dataclass(frozen=True)
class Levels:
    """State of an allowance, as sent to another process."""

    requests: float  # requests that can be given now; 0 without a limit
    tokens: float  # tokens that can be given now; 0 without a limit
    elsewhere: int  # requests under way at other gateways than the receiver


class Allowance:
    """Limits of one tenant, and what requests have used of them.

    Each gateway reports its own number of requests under way, which replaces its earlier reports.
    """

    def __init__(self, tenant: str, settings: TenantSettings, clock: Callable[[], float]) -> None:
        """
        Args:
            tenant: name of the tenant.
            clock: returns seconds.
        """

        def bucket(limit: int | None) -> Bucket | None:
            return None if limit is None else Bucket(limit, clock)

        self.requests, self.tokens = bucket(settings.requests_per_minute), bucket(settings.tokens_per_minute)
        self._tenant = tenant
        self._parallel = settings.parallel_requests
        self._under_way: dict[str, int] = {}  # requests by gateway

    def take(self, gateway: str, tokens: float, under_way: int) -> None:
        """Charges a request with the tokens that it is expected to use.

        Args:
            under_way: requests of the tenant at this gateway, with this request.

        Raises:
            LimitReachedError: a limit is reached; the request is charged to no limit.
        """
        self.set_under_way(gateway, under_way - 1)
        self._check(tokens)
        self.set_under_way(gateway, under_way)
        if self.requests is not None:
            self.requests.give(1)
        if self.tokens is not None:
            self.tokens.give(tokens)

    def settle(self, gateway: str, tokens: float, under_way: int) -> None:
        """Charges the difference between used and expected tokens, negative if fewer were used.

        under_way: requests of the tenant at this gateway, without this request.
        """
        self.set_under_way(gateway, under_way)
        if self.tokens is not None:
            self.tokens.give(tokens)

    def set_under_way(self, gateway: str, under_way: int) -> None:
        """Records how many requests a gateway has under way."""
        self._under_way[gateway] = under_way

    def forget(self, gateway: str) -> None:
        """Drops the requests of a lost gateway."""
        self._under_way.pop(gateway, None)

    def levels(self, gateway: str) -> Levels:
        """Returns the state as sent to a gateway."""
        elsewhere = sum(self._under_way.values()) - self._under_way.get(gateway, 0)
        requests, tokens = [0.0 if each is None else each.level for each in (self.requests, self.tokens)]
        return Levels(requests, tokens, elsewhere)

    def use(self, levels: Levels) -> None:
        """Applies the state of the allowance that all gateways share."""
        self.set_under_way(ELSEWHERE, levels.elsewhere)
        if self.requests is not None:
            self.requests.level = levels.requests
        if self.tokens is not None:
            self.tokens.level = levels.tokens

    def _check(self, tokens: float) -> None:
        under_way = sum(self._under_way.values())
        if self._parallel is not None and under_way >= self._parallel:
            raise LimitReachedError(
                "parallel_requests",
                f"parallel_requests={self._parallel} of tenant {self._tenant!r}: {under_way} of its "
                "requests are under way, more are not accepted",
                PARALLEL_RETRY_S,
            )
        asked = (("requests_per_minute", self.requests, 1.0), ("tokens_per_minute", self.tokens, tokens))
        for name, bucket, units in asked:
            if bucket is not None and (wait_s := bucket.wait_s(units)):
                raise LimitReachedError(
                    name,
                    f"{name}={bucket.limit} of tenant {self._tenant!r}: {bucket.left} are left, and the "
                    f"request counts as {units:.0f}; ask again in {math.ceil(wait_s)} s",
                    wait_s,
                )
