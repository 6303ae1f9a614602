"""Client of /v1/messages from Anthropic's own package."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx2

from tests.support.http_calls import ANSWER, app_of

PATH = "/v1/messages"
USER = {"role": "user", "content": "x"}
ASK: dict[str, Any] = {"model": "m", "messages": [USER], "max_tokens": len(ANSWER)}


@asynccontextmanager
async def sdk_of(
    tokenizer: Any, *workers: Any, key: str = "k", **given: Any
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Yields a client of an app without a server. given: arguments of ``app_of``."""
    async with (
        app_of(tokenizer, *workers, **given) as app,
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as http,
    ):
        yield anthropic.AsyncAnthropic(
            api_key=key, base_url="http://localhost", http_client=http, max_retries=0
        )
