"""When a gateway says that it answers requests, as well as its deployment can."""

import asyncio

import pytest

from gateway.generation import readiness
from gateway.generation.generation import Generation
from gateway.generation.readiness import Readiness
from gateway.generation.request import Request
from gateway.settings import GatewaySettings, Speculation
from gateway.workers.fleet import Fleet
from outrider.decoding.settings import Sampling
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget, fleet_of
from tests.support.http_calls import ANSWER, ASK, client_of
from tests.support.patience import LIMIT_S, eventually
from tests.support.trust import TRUST


@pytest.fixture(autouse=True)
def drafts_are_awaited(monkeypatch, no_draft_is_awaited):
    monkeypatch.setattr(readiness, "DRAFTS_WITHIN_S", 60.0)


async def test_lack_until_target_and_every_draft_are_there_names_what_is_awaited():
    async with fleet_of(
        ScriptedTarget(ANSWER), ScriptedDraft(ANSWER), ScriptedDraft(ANSWER, name="next")
    ) as all_:
        target, first, second = all_.workers()
        there = []
        gateway = Readiness(Fleet(lambda: there, TRUST), ["model", "next"])
        assert gateway.missing() == "no target worker is ready"
        there += [first, target]
        assert gateway.missing() == "a draft worker is not ready yet"
        there += [second]
        assert gateway.missing() is None
        there.remove(first)  # its loss means depth 0
        assert gateway.missing() is None


async def test_lack_with_a_draft_that_never_comes_ends(monkeypatch):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        gateway = Readiness(fleet, ["model"])
        assert gateway.missing() == "a draft worker is not ready yet"
        monkeypatch.setattr(readiness, "DRAFTS_WITHIN_S", 0.0)
        assert gateway.missing() is None


async def test_request_before_the_draft_is_there_waits_and_is_then_drafted_for(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as all_:
        target, draft = all_.workers()
        there = [target]
        settings = GatewaySettings(model="m", tokenizer="unused")
        generation = Generation(settings, tokenizer, Fleet(lambda: there, TRUST))
        drafted = Request(("x",), Sampling(max_tokens=len(ANSWER)), (), Speculation(mode="fixed", depth=4))
        asked = await generation.prepare(drafted)
        chunks = generation.chunks(asked)
        first = asyncio.ensure_future(anext(chunks))
        await eventually(lambda: generation.admission.running == 1)
        for _ in range(10):
            await asyncio.sleep(0)  # in which a request that does not wait opens its sequence
        assert not any(link.streams for link in generation.fleet.links())
        there.append(draft)
        said = [await first, *[chunk async for chunk in chunks]]
        assert said[-1].usage.stats.drafted > 0


async def test_plain_request_before_the_draft_is_there_is_answered_at_once(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER)) as client:
        plain = {**ASK, "speculation": {"mode": "off"}}
        async with asyncio.timeout(LIMIT_S):
            asked = await client.post("/v1/completions", json=plain)
        assert asked.status_code == 200


async def test_request_that_waits_for_the_draft_ends_at_its_deadline(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), request_deadline_s=0.05) as client:
        assert (await client.post("/v1/completions", json=ASK)).status_code == 504


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_probes_before_the_draft_is_there_answer_503(tokenizer, path, monkeypatch):
    async with client_of(tokenizer, ScriptedTarget(ANSWER)) as client:
        assert (await client.get(path)).status_code == 503
        assert (await client.get("/health")).json()["status"] == "a draft worker is not ready yet"
    async with client_of(tokenizer, ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as client:
        assert (await client.get(path)).status_code == 200


async def test_readiness_without_drafts_needs_a_target_alone():
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        assert Readiness(fleet, []).missing() is None
