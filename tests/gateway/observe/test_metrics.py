"""Metrics of a gateway are the sums of what its requests have in their usage."""

from contextlib import aclosing, nullcontext
from dataclasses import replace

import pytest

from gateway.api.message_json import as_json
from gateway.errors import LimitReachedError, OverloadedError
from gateway.generation.generation import Generation
from gateway.generation.request import Request
from gateway.generation.totals import MAX_TASKS, OTHER, Totals
from gateway.observe.loads import loads
from gateway.observe.metrics import publish
from gateway.settings import GatewaySettings, Speculation, TenantSettings
from outrider.decoding.settings import Sampling
from outrider.telemetry.reasons import DepthReason
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget, fleet_of
from tests.support.published import Published

ANSWER = list(b"an answer of several words")
REPEATED = list(b"over and over and over and over and over and over")
SETTINGS = GatewaySettings(model="m", tokenizer="unused")


def request(task="t", **speculation):
    sampling = Sampling(max_tokens=len(ANSWER))
    return Request(("x",), sampling, speculation=Speculation(**speculation), task=task)


async def answered(generation, request):
    return [chunk async for chunk in generation.chunks(await generation.prepare(request))][-1].usage.stats


@pytest.mark.parametrize(
    "speculation", [{}, {"mode": "fixed", "depth": 4}, {"drafter": "ngram"}], ids=["auto", "fixed", "ngram"]
)
async def test_publish_counters_are_the_sums_of_the_usage(tokenizer, speculation):
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER, wrong=[3, 10])) as fleet:
        generation, published = Generation(SETTINGS, tokenizer, fleet), Published()
        total = await answered(generation, request(**speculation))
        total.add(await answered(generation, request(**speculation)))
        publish(generation, published)
    drafter = speculation.get("drafter", "model")
    counted = {
        key[0]: value
        for key, value in published.totals.items()
        if key[1:] == ("t", drafter, *(("m", "0") if key[0].startswith("vllm_") else ()))
    }
    assert counted == {
        "vllm_spec_decode_num_drafts": total.rounds,
        "vllm_spec_decode_num_draft_tokens": total.drafted,
        "vllm_spec_decode_num_accepted_tokens": total.accepted,
        "outrider_reached_tokens": total.reached,
        "outrider_tokens": 2 * len(ANSWER),
        "outrider_target_passes": total.target_passes,
        "outrider_draft_seconds": total.draft_s,
        "outrider_target_seconds": total.target_s,
        "outrider_prepared_verdicts": 0,
        "outrider_ahead_hits": 0,
        "outrider_continued_rounds": 0,
        "outrider_draft_saved_seconds": 0.0,
        "outrider_wasted_tokens": 0,
        "outrider_forced_tokens": 0,
        "outrider_reopenings": 0,
        "outrider_hedges": 0,
        "outrider_moves": 0,
        "outrider_second_target_seconds": 0.0,
    }
    if drafter == "model":
        assert total.drafted > total.reached > total.accepted > 0
    positions = [
        value for key, value in published.totals.items() if key[0].endswith("accepted_tokens_per_pos")
    ]
    assert sum(positions) == total.accepted
    assert positions == sorted(positions, reverse=True)


async def test_publish_tenants_are_counted_under_their_names(tokenizer):
    limited = TenantSettings(requests_per_minute=1)
    settings = SETTINGS.model_copy(update={"tenants": {"search": limited}, "tenant_keys": {"key": "search"}})
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        generation, published = Generation(settings, tokenizer, fleet), Published()
        for caller, refused in (("key", False), ("key", True), (None, False)):
            prepared = await generation.prepare(request(), caller)
            with pytest.raises(LimitReachedError) if refused else nullcontext():
                assert [chunk async for chunk in generation.chunks(prepared)]
        publish(generation, published)
    told = {key: value for key, value in published.totals.items() if key[0].startswith("outrider_tenant")}
    waited_s = told.pop(("outrider_tenant_queue_seconds", "search"))
    assert 0.0 <= waited_s < 1.0
    del told["outrider_tenant_queue_seconds", "unnamed"]
    tokens = {"outrider_tenant_prompt_tokens": 1, "outrider_tenant_answer_tokens": len(ANSWER)}
    each = {**tokens, "outrider_tenant_parked": 0}
    assert told == {
        **{(name, tenant): value for name, value in each.items() for tenant in ("search", "unnamed")},
        ("outrider_tenant_requests", "search"): 2,
        ("outrider_tenant_requests", "unnamed"): 1,
        ("outrider_tenant_refusals", "search", "requests_per_minute"): 1,
    }


async def test_publish_mixed_drafter_is_counted_by_who_drafted(tokenizer):
    async with fleet_of(ScriptedTarget(REPEATED), ScriptedDraft(REPEATED, wrong=range(12))) as fleet:
        generation, published = Generation(SETTINGS, tokenizer, fleet), Published()
        asked = request(drafter="model+suffix", mode="fixed", depth=4)
        asked = replace(asked, sampling=Sampling(max_tokens=len(REPEATED)))
        stats = await answered(generation, asked)
        publish(generation, published)
    assert stats.drafted_by.keys() == {"model", "suffix"}
    for what, metric in (
        ("rounds", "rounds"),
        ("reached", "reached_tokens"),
        ("accepted", "accepted_tokens"),
    ):
        name = f"outrider_drafted_by_{metric}"
        told = {key[-1]: value for key, value in published.totals.items() if key[0] == name}
        assert told == {drafter: counts[what] for drafter, counts in stats.drafted_by.items()}
        assert sum(told.values()) == getattr(stats, what) > 0


async def test_publish_request_without_drafts_counts_under_no_drafter(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        generation, published = Generation(SETTINGS, tokenizer, fleet), Published()
        await answered(generation, request(mode="off"))
        publish(generation, published)
    assert published.totals["outrider_target_passes", "t", "none"] == len(ANSWER)
    assert published.totals["vllm_spec_decode_num_drafts", "t", "none", "m", "0"] == 0


async def test_publish_times_of_a_request_are_in_order(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER, step_s=0.002)) as fleet:
        generation, published = Generation(SETTINGS, tokenizer, fleet), Published()
        await answered(generation, request(mode="off"))
        publish(generation, published)
        publish(generation, published)
    ((queue_s, _),) = published.observed["outrider_queue_seconds"]
    ((first_s, _),) = published.observed["gen_ai_server_time_to_first_token_seconds"]
    ((token_s, _),) = published.observed["gen_ai_server_time_per_output_token_seconds"]
    ((total_s, labels),) = published.observed["gen_ai_server_request_duration_seconds"]
    assert 0 <= queue_s <= first_s < total_s
    assert first_s + token_s * (len(ANSWER) - 1) == pytest.approx(total_s)
    assert labels["error_type"] == ""


async def test_publish_reader_that_leaves_after_the_last_chunk_is_no_error(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        generation, published = Generation(SETTINGS, tokenizer, fleet), Published()
        async with aclosing(generation.chunks(await generation.prepare(request()))) as chunks:
            while (await anext(chunks)).usage is None:
                pass
        publish(generation, published)
    ((_, labels),) = published.observed["gen_ai_server_request_duration_seconds"]
    assert labels["error_type"] == ""


async def test_publish_failed_request_names_its_error(tokenizer):
    limits = {"max_requests": 1, "max_waiting": 0}
    async with fleet_of(ScriptedTarget(ANSWER, step_s=0.01)) as fleet:
        generation, published = Generation(SETTINGS.model_copy(update=limits), tokenizer, fleet), Published()
        async with aclosing(generation.chunks(await generation.prepare(request()))) as first:
            await anext(first)
            publish(generation, published)
            assert published.gauges["outrider_requests_running",] == 1
            with pytest.raises(OverloadedError):
                await anext(generation.chunks(await generation.prepare(request())))
        publish(generation, published)
    errors = [
        labels["error_type"] for _, labels in published.observed["gen_ai_server_request_duration_seconds"]
    ]
    assert errors == ["OverloadedError", "cancelled"]


@pytest.mark.parametrize(
    ("speculation", "reason", "depth"),
    [({"mode": "off"}, "off", 0), ({"mode": "fixed", "depth": 3}, "fixed", 3), ({}, "thresholds", 4)],
    ids=["off", "fixed", "auto"],
)
async def test_publish_depth_in_force_has_its_reason(tokenizer, speculation, reason, depth):
    async with fleet_of(ScriptedTarget(ANSWER, step_s=0.01), ScriptedDraft(ANSWER)) as fleet:
        generation, published = Generation(SETTINGS, tokenizer, fleet), Published()
        async with aclosing(generation.chunks(await generation.prepare(request(**speculation)))) as chunks:
            await anext(chunks)
            publish(generation, published)
    sequences = {name: published.gauges["outrider_sequences", name] for name in DepthReason}
    assert sequences == {name: int(name == reason) for name in DepthReason}
    assert published.gauges["outrider_depth", reason] == depth


async def test_publish_lost_draft_worker_is_a_fallback_and_a_transition(tokenizer):
    draft = ScriptedDraft(ANSWER, lost_at=[3])
    async with fleet_of(ScriptedTarget(ANSWER, step_s=0.01), draft) as fleet:
        generation, published = Generation(SETTINGS, tokenizer, fleet), Published()
        await answered(generation, request(mode="fixed", depth=2))
        publish(generation, published)
    assert published.totals["outrider_fallbacks", "t", "model", DepthReason.LOST] == 1
    assert published.totals["outrider_transitions", "t", "model", "off", DepthReason.LOST] == 1


async def test_publish_lost_target_is_a_reopening(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER, lost_at=[3]), ScriptedDraft(ANSWER)) as fleet:
        generation, published = Generation(SETTINGS, tokenizer, fleet), Published()
        await answered(generation, request(mode="fixed", depth=2))
        publish(generation, published)
    assert published.totals["outrider_reopenings", "t", "model"] == 1


def test_totals_many_client_labels_are_bounded():
    totals = Totals()
    labels = [totals.label(f"task {number}") for number in range(MAX_TASKS + 2)]
    assert labels[:MAX_TASKS] == [f"task {number}" for number in range(MAX_TASKS)]
    assert labels[MAX_TASKS:] == [OTHER, OTHER]
    assert totals.label("task 0") == "task 0"


async def test_publish_before_the_cost_of_plain_decoding_is_known_tells_no_speed(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        generation, published = Generation(SETTINGS, tokenizer, fleet), Published()
        generation.plain_rate = lambda: None
        publish(generation, published)
        assert ("outrider_plain_tokens_per_second",) not in published.gauges
        assert not loads(generation).HasField("plain_tokens_per_second")
        assert "plain_tokens_per_second" not in as_json(loads(generation))
        generation.plain_rate = lambda: 147.0
        publish(generation, published)
        assert published.gauges["outrider_plain_tokens_per_second",] == 147.0
        assert loads(generation).plain_tokens_per_second == 147.0
