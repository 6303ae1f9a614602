"""Limits of a tenant in response headers, as clients of OpenAI's and of Anthropic's API read them."""

import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.tenants.bucket import Bucket
from gateway.tenants.tenant import Tenant

TENANT = "outrider.tenant"  # key of the ASGI scope


class LimitHeaders:
    """ASGI middleware that adds what is left of a tenant's limits to its responses, refusals included."""

    def __init__(self, app: ASGIApp, anthropic: str) -> None:
        """anthropic: prefix of the paths whose clients read Anthropic's headers."""
        self._app = app
        self._anthropic = anthropic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def telling(message: Message) -> None:
            tenant = scope.get(TENANT)
            if message["type"] == "http.response.start" and tenant is not None:
                is_anthropic = scope["path"].startswith(self._anthropic)
                told = anthropic_headers(tenant) if is_anthropic else openai_headers(tenant)
                MutableHeaders(scope=message).update(told)
            await send(message)

        await self._app(scope, receive, telling)


def openai_headers(tenant: Tenant) -> dict[str, str]:
    """Returns OpenAI's headers: limit, remaining units, and time until the limit is full again."""
    headers = {}
    for unit, bucket in _limits(tenant):
        headers[f"x-ratelimit-limit-{unit}"] = str(bucket.limit)
        headers[f"x-ratelimit-remaining-{unit}"] = str(bucket.left)
        headers[f"x-ratelimit-reset-{unit}"] = duration(bucket.full_in_s)
    return headers


def anthropic_headers(tenant: Tenant) -> dict[str, str]:
    """Returns Anthropic's headers: limit, remaining units, and time of day when the limit is full again."""
    headers = {}
    for unit, bucket in _limits(tenant):
        reset = datetime.now(UTC) + timedelta(seconds=math.ceil(bucket.full_in_s))
        headers[f"anthropic-ratelimit-{unit}-limit"] = str(bucket.limit)
        headers[f"anthropic-ratelimit-{unit}-remaining"] = str(bucket.left)
        headers[f"anthropic-ratelimit-{unit}-reset"] = reset.strftime("%Y-%m-%dT%H:%M:%SZ")
    return headers


def duration(seconds: float) -> str:
    """Returns a duration in OpenAI's notation: ``12ms``, ``1s``, ``6m0s``."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _limits(tenant: Tenant) -> Iterator[tuple[str, Bucket]]:
    if tenant.allowance.requests is not None:
        yield "requests", tenant.allowance.requests
    if tenant.allowance.tokens is not None:
        yield "tokens", tenant.allowance.tokens
