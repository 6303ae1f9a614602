"""Settings that change while a gateway runs: its pace, and drafts that join or leave."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer

from gateway.errors import InvalidRequestError
from gateway.generation.generation import Generation
from gateway.generation.request import Request
from gateway.loop.stats import Stats
from gateway.observe.loads import loads
from gateway.observe.metrics import publish
from gateway.roster import BY_TASK
from gateway.routing import rollout, route, router
from gateway.routing.tuning import TUNING
from gateway.settings import GatewaySettings, LiveSettings, Speculation
from outrider.decoding.settings import Sampling
from outrider.pace.controller import Pace
from outrider.pace.settings import PaceSettings
from outrider.telemetry.reasons import RouteReason
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget, fleet_of
from tests.support.published import Published

STARTED = GatewaySettings(model="m", tokenizer="t")
ANSWER = list(b"an answer that is long enough for many rounds of a draft that is always right, or wrong")
JOINED = LiveSettings(drafts={"next": "model"}, exploration=1.0)


def test_draft_that_joined_is_new_until_the_drafters_list_it() -> None:
    new = STARTED.changed(JOINED)
    assert (new.drafters, new.new_drafts, new.usual_drafter) == (("model",), ("next",), BY_TASK)
    assert {"next", "next+suffix", "model"} <= new.roster.names
    for drafters in (("next",), ("next+suffix",), ("model", "next")):
        listed = STARTED.changed(JOINED.model_copy(update={"drafters": drafters}))
        assert (listed.drafters, listed.new_drafts) == (drafters, ())
    assert STARTED.changed(LiveSettings()) == STARTED


@pytest.mark.parametrize(
    ("live", "told"),
    [
        ({"drafts": {"model": "model"}}, r"drafts\.model has the name of something else"),
        ({"drafts": {"ngram": "model"}}, r"drafts\.ngram has the name of something else"),
        ({"drafts": {"auto": "model"}}, r"drafts\.auto has the name of something else"),
        ({"drafters": ["next"]}, "there is no drafter 'next'; there are: model"),
    ],
)
def test_live_settings_taken_or_unknown_name_is_refused(live: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        STARTED.changed(LiveSettings.model_validate(live))


@pytest.mark.parametrize("live", [{"drafts": {"n": "eagle3"}}, {"drafters": []}, {"draft": {}}])
def test_live_settings_unknown_field_is_refused(live: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LiveSettings.model_validate(live)


def test_live_settings_pace_gets_its_own_part() -> None:
    live = LiveSettings.model_validate({"max_depth": 3, "drafts": {"next": "model"}})
    assert live.pace == PaceSettings(max_depth=3)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes first guesses alone decide a drafter's worth, since scripted workers tell no times."""
    monkeypatch.setattr(router, "TUNING", replace(TUNING, decided_for_s=0.0))
    monkeypatch.setattr(rollout, "TUNING", replace(TUNING, drafts=8))
    monkeypatch.setattr(Pace, "rate", lambda self, info, rates, max_depth: 1.0 + rates[0])


WRONG = range(len(ANSWER))


@asynccontextmanager
async def generating(tokenizer: Tokenizer, *drafts: ScriptedDraft) -> AsyncIterator[Generation]:
    async with fleet_of(ScriptedTarget(ANSWER), *drafts) as fleet:
        yield Generation(STARTED, tokenizer, fleet)


async def answered(generation: Generation, **speculation: Any) -> Stats:
    request = Request(
        ("x",),
        Sampling(max_tokens=len(ANSWER)),
        speculation=Speculation(mode="fixed", depth=2, **speculation),
        task="t",
    )
    chunks = [chunk async for chunk in generation.chunks(await generation.prepare(request))]
    assert [token.id for chunk in chunks for token in chunk.tokens] == ANSWER
    assert chunks[-1].usage is not None
    return chunks[-1].usage.stats


async def until_share(generation: Generation, share: float) -> list[Stats]:
    """Returns the answers until the new draft has the share."""
    stats: list[Stats] = []
    async with asyncio.timeout(60):
        while not any(rollout.share == share for _, _, rollout in generation.rollouts):
            stats.append(await answered(generation))
    return stats


@pytest.mark.slow
async def test_draft_that_is_better_takes_over_step_by_step(tokenizer: Tokenizer) -> None:
    old, new = ScriptedDraft(ANSWER, wrong=WRONG), ScriptedDraft(ANSWER, name="next")
    async with generating(tokenizer, old, new) as generation:
        before = await answered(generation)
        assert before.routed == {"model": {RouteReason.NAMED: 1}}
        generation.use(JOINED)
        shadow = await until_share(generation, TUNING.shares[1])
        assert all("next" not in answer.drafted_by for answer in shadow[:-1])
        assert sum(answer.judged["next"]["correct"] for answer in shadow) > 0
        growing = await until_share(generation, 1.0)
        assert 0 < sum("next" in answer.drafted_by for answer in growing) < len(growing)
        after = await answered(generation)
        assert after.routed == {"next": {RouteReason.ROLLED_OUT: 1}}
        published = Published()
        publish(generation, published)  # type: ignore[arg-type]
        (told,) = loads(generation).rollouts
    labels = ("t", "coupled", "next")
    assert published.gauges["outrider_rollout_share", *labels] == 1.0
    assert told.changes == {f"{share:g}": 1 for share in TUNING.shares[1:]}
    for share in told.changes:
        assert published.totals["outrider_rollout_changes", *labels, share] == 1
    assert (told.draft, told.task, told.share) == ("next", "t", 1.0)
    assert told.tokens_per_second > told.others_tokens_per_second > 0.0


async def test_draft_that_is_worse_never_drafts(tokenizer: Tokenizer) -> None:
    old, new = ScriptedDraft(ANSWER), ScriptedDraft(ANSWER, name="next", wrong=WRONG)
    async with generating(tokenizer, old, new) as generation:
        generation.use(JOINED)
        stats = [await answered(generation) for _ in range(20)]
        (told,) = loads(generation).rollouts
    assert all("next" not in answer.drafted_by for answer in stats)
    assert (told.share, told.changes) == (0.0, {})
    assert told.seen > told.needed


@pytest.mark.slow
async def test_draft_that_becomes_worse_goes_back_within_its_sequences(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "TUNING", replace(TUNING, least_left=4))
    old, new = ScriptedDraft(ANSWER, wrong=WRONG), ScriptedDraft(ANSWER, name="next")
    async with generating(tokenizer, old, new) as generation:
        generation.use(JOINED)
        await until_share(generation, 1.0)
        old.wrong, new.wrong = (), WRONG
        stats = await until_share(generation, 0.0)
        assert sum(answer.routed["model"][RouteReason.WENT_BACK] for answer in stats) == 1
        assert (await answered(generation)).drafted_by.keys() == {"model"}


@pytest.mark.slow
async def test_draft_that_is_new_and_lost_leaves_its_sequence_to_the_old_draft(tokenizer: Tokenizer) -> None:
    old, new = ScriptedDraft(ANSWER, wrong=WRONG), ScriptedDraft(ANSWER, name="next")
    async with generating(tokenizer, old, new) as generation:
        generation.use(JOINED)
        await until_share(generation, 1.0)
        new.lost_at = range(10**6)
        stats = await answered(generation)
        assert stats.routed == {"next": {RouteReason.ROLLED_OUT: 1}, "model": {RouteReason.LOST: 1}}
        assert [rollout.share for _, _, rollout in generation.rollouts] == [0.0]


async def test_draft_that_left_drafts_no_more_even_for_a_waiting_request(tokenizer: Tokenizer) -> None:
    old, new = ScriptedDraft(ANSWER), ScriptedDraft(ANSWER, name="next")
    async with generating(tokenizer, old, new) as generation:
        generation.use(JOINED)
        assert (await answered(generation, drafter="next")).drafted_by.keys() == {"next"}
        named = Speculation(mode="fixed", depth=2, drafter="next")
        request = Request(("x",), Sampling(max_tokens=len(ANSWER)), speculation=named)
        waiting = await generation.prepare(request)
        generation.use(LiveSettings())
        chunks = [chunk async for chunk in generation.chunks(waiting)]
        assert [token.id for chunk in chunks for token in chunk.tokens] == ANSWER
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.stats.drafted_by.keys() == {"model"}
        with pytest.raises(InvalidRequestError, match="there is no drafter 'next'"):
            await generation.prepare(request)
    assert [*generation.rollouts] == []


@pytest.mark.slow
async def test_draft_that_comes_too_late_counts_as_a_wrong_guess(tokenizer: Tokenizer) -> None:
    old, new = ScriptedDraft(ANSWER, wrong=WRONG), ScriptedDraft(ANSWER, name="next")
    async with generating(tokenizer, old, new) as generation:
        generation.use(JOINED)
        await until_share(generation, 1.0)
        ((_, _, so_far),) = generation.rollouts
        seen, new.silent = so_far.seen, asyncio.Event()
        assert (await answered(generation)).late_drafts == 1
        assert so_far.seen == seen + 1
