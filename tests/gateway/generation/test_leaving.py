"""A gateway whose service is stopped: what comes is refused, what is under way ends, one way or the other."""

import asyncio
import json

import httpx
import pytest

from gateway.api import http_api
from gateway.api.access import Authentication
from gateway.generation.generation import Generation
from gateway.settings import GatewaySettings
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget, fleet_of
from tests.support.http_calls import ANSWER, TEMPLATE, TEXT, events_of
from tests.support.patience import LIMIT_S, eventually

ASK = {"prompt": "x", "max_tokens": len(ANSWER), "stream": True, "speculation": {"mode": "fixed", "depth": 4}}


class Service:
    """A gateway whose target gives no Verdict on a Draft until it may."""

    def __init__(self, tokenizer, **limits) -> None:
        self.may = asyncio.Event()
        self.workers = ScriptedTarget(ANSWER, verifying=self.may), ScriptedDraft(ANSWER)
        self._tokenizer = tokenizer
        self._settings = GatewaySettings(model="m", tokenizer="unused", **limits)

    async def __aenter__(self):
        self._fleet = fleet_of(*self.workers)
        self.generation = Generation(self._settings, self._tokenizer, await self._fleet.__aenter__())
        app = http_api.build(self.generation, TEMPLATE, Authentication((), anonymous=True))
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        return self

    async def __aexit__(self, *error):
        self.may.set()
        await self.client.aclose()
        await self._fleet.__aexit__(*error)

    async def asking(self, **fields):
        """A request, once it is under way."""
        before = self.generation.admission.running + self.generation.admission.waiting
        task = asyncio.create_task(self.client.post("/v1/completions", json=ASK | fields))
        await eventually(
            lambda: self.generation.admission.running + self.generation.admission.waiting > before
        )
        return task


async def test_leave_lets_a_stream_end_and_refuses_what_comes_meanwhile(tokenizer):
    async with Service(tokenizer) as service:
        stream = await service.asking()
        leaving = asyncio.create_task(service.generation.leave(LIMIT_S))
        await eventually(lambda: service.generation.readiness.is_leaving)
        refused = await service.client.post("/v1/completions", json=ASK)
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert "is being stopped" in refused.json()["error"]["message"]
        health = await service.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "the service is being stopped")
        assert not leaving.done()
        service.may.set()
        *told, last = events_of(await stream)
        assert await leaving == 1
    assert "".join(json.loads(event)["choices"][0]["text"] for event in told) == TEXT
    assert last == "[DONE]"


async def test_leave_before_the_first_token_of_a_stream_answers_it_with_503(tokenizer):
    async with Service(tokenizer) as service:
        stream = await service.asking()
        assert await service.generation.leave(0.0) == 1
        assert (await stream).status_code == 503


async def test_leave_with_a_stream_that_takes_too_long_ends_it_with_an_error_event(tokenizer):
    async with Service(tokenizer) as service:
        target = service.workers[0]
        target.step_s = 0.5
        stream = await service.asking(speculation={"mode": "off"})
        await eventually(lambda: target.said > 1)
        assert await service.generation.leave(0.0) == 1
        *_, error, last = events_of(await stream)
    assert "is being stopped" in json.loads(error)["error"]["message"]
    assert last == "[DONE]"


async def test_leave_puts_out_whoever_still_waits_in_the_queue(tokenizer):
    async with Service(tokenizer, max_requests=1) as service:
        first, second = await service.asking(), await service.asking(stream=False)
        assert service.generation.admission.waiting == 1
        assert await service.generation.leave(0.0) == 2
        assert (await second).status_code == 503
        await first
        assert service.generation.admission.waiting == service.generation.admission.running == 0


async def test_leave_without_requests_returns_at_once(tokenizer):
    async with Service(tokenizer) as service:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio, "timeout", lambda seconds: asyncio.timeout_at(None))
            assert await service.generation.leave(LIMIT_S) == 0
