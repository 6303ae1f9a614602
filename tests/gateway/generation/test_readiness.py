"""When a gateway says that it answers requests, as well as its deployment can."""

import pytest

from gateway.generation import readiness
from gateway.generation.readiness import Readiness
from gateway.workers.fleet import Fleet
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget, fleet_of
from tests.support.http_calls import ANSWER, client_of
from tests.support.trust import TRUST


async def test_lack_until_target_and_every_draft_are_there_names_what_is_awaited():
    async with fleet_of(
        ScriptedTarget(ANSWER), ScriptedDraft(ANSWER), ScriptedDraft(ANSWER, name="next")
    ) as all_:
        target, first, second = all_.workers()
        there = []
        gateway = Readiness(Fleet(lambda: there, TRUST), ["model", "next"])
        assert gateway.lack() == "no target worker is ready"
        there += [first, target]
        assert gateway.lack() == "a draft worker is not ready yet"
        there += [second]
        assert gateway.lack() is None
        there.remove(first)  # its loss means depth 0
        assert gateway.lack() is None


async def test_lack_with_a_draft_that_never_comes_ends(monkeypatch):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        gateway = Readiness(fleet, ["model"])
        assert gateway.lack() == "a draft worker is not ready yet"
        monkeypatch.setattr(readiness, "DRAFTS_WITHIN_S", 0.0)
        assert gateway.lack() is None


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_probes_before_the_draft_is_there_answer_503(tokenizer, path, monkeypatch):
    async with client_of(tokenizer, ScriptedTarget(ANSWER)) as client:
        assert (await client.get(path)).status_code == 503
        assert (await client.get("/health")).json()["status"] == "a draft worker is not ready yet"
        asked = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": len(ANSWER)})
        assert asked.status_code == 200  # what comes earlier is answered all the same
    async with client_of(tokenizer, ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as client:
        assert (await client.get(path)).status_code == 200


async def test_readiness_without_drafts_needs_a_target_alone():
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        assert Readiness(fleet, []).lack() is None
