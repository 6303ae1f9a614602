"""Caches smaller than the context: a worker publishes what fits, and everything follows from that."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import httpx
import pytest
from tokenizers import Tokenizer

from gateway.api import http_api
from gateway.api.access import Authentication
from gateway.api.openai.chat_template import load_chat_template
from gateway.generation.generation import Generation
from gateway.settings import GatewaySettings
from gateway.workers.fleet import Fleet
from gateway.workers.streams import Role
from outrider.demo.prompts import DEMO
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from tests.support.pair import worker_of
from tests.support.trust import TRUST

TARGET_CACHE = 2**21  # bytes: 336 tokens
DRAFT_CACHE = 2**17  # bytes: 240 tokens
CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


@asynccontextmanager
async def served(**caches: int) -> AsyncIterator[httpx.AsyncClient]:
    """The demo pair behind HTTP, with so much cache by role."""
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(worker_of(cast(Role, role), 0.0, cache_memory=cache))
            for role, cache in caches.items()
        ]
        fleet = Fleet(lambda: workers, TRUST)
        stack.push_async_callback(fleet.close)
        settings = GatewaySettings(model="m", tokenizer="unused")
        generation = Generation(settings, Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json")), fleet)
        template = load_chat_template(str(DEMO / "target"))
        app = http_api.build(generation, template, Authentication((), anonymous=True))
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60
        )
        yield await stack.enter_async_context(client)


async def asked(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_engine_reports_the_longest_sequence_of_its_cache() -> None:
    engine = Engine.from_settings(
        EngineSettings(model=str(DEMO / "target"), threads=1, cache_memory=TARGET_CACHE)
    )
    assert engine.max_length == engine._cache.capacity < 2048
    whole = Engine.from_settings(EngineSettings(model=str(DEMO / "draft"), threads=1, cache_memory=2**26))
    assert whole.max_length == 2048 < whole._cache.capacity


async def test_chat_without_max_tokens_may_fill_the_cache() -> None:
    """It used to be refused, whatever its length: the gateway asked for the whole context."""
    async with served(target=TARGET_CACHE) as client:
        told = await asked(client, ignore_eos=True, stop=["never said"])
        usage = told["usage"]
        assert told["choices"][0]["finish_reason"] == "length"
        assert usage["prompt_tokens"] + usage["completion_tokens"] == 336
        refused = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1000})
        assert refused.status_code == 400
        assert "at most" in refused.json()["error"]["message"]


@pytest.mark.slow
async def test_draft_worker_drafts_while_its_cache_holds_the_sequence() -> None:
    """It used to send empty Drafts from the start for what might outgrow its cache in the end."""
    async with served(target=2**26, draft=DRAFT_CACHE) as client:
        fixed = {"speculation": {"mode": "fixed", "depth": 4}, "ignore_eos": True}
        short = await asked(client, max_tokens=100, **fixed)
        long = await asked(client, max_tokens=600, **fixed)
    assert short["usage"]["speculation"]["accepted"] > 0
    assert long["usage"]["speculation"]["accepted"] >= short["usage"]["speculation"]["accepted"]
    assert long["usage"]["completion_tokens"] == 600
    assert long["choices"][0]["message"]["content"].startswith(short["choices"][0]["message"]["content"])
