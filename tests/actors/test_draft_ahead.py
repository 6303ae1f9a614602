"""Draft-ahead through gateway and workers: real engines behind real gRPC, the demo pair."""

import asyncio

import pytest
from opentelemetry.trace import get_tracer

from outrider.demo.prompts import DEMO, KINDS
from protos.trace_context import context_of
from tests.fakes.spans import TRACEPARENT
from tests.support.functions import needs_functions
from tests.support.pair import HELD_S, OFF, answer, expected, pair
from tests.support.patience import eventually


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.7])
async def test_draft_ahead_changes_no_text_and_foresees_most_verdicts(temperature):
    """The target's step is held, as a large model's would be: there is time to prepare."""
    async with pair(12, shortest_step_s=HELD_S) as fleet:
        found = []
        for kind in ("code", "json", "question_answer"):
            text, stats = await answer(fleet, kind, temperature=temperature)
            assert text == expected(kind, temperature), kind
            found.append(stats)
    ahead_hits = sum(stats.ahead_hits.total() for stats in found)
    assert ahead_hits >= 0.6 * sum(stats.prepared_for for stats in found)
    assert sum(stats.continued for stats in found) > 0
    assert all(stats.saved_s > 0 for stats in found)


@pytest.mark.parametrize("delay_s", [0.001, 0.004])
@pytest.mark.parametrize("times", [1, pytest.param(6, marks=pytest.mark.slow)])
async def test_messages_that_cross_on_the_wire_change_no_token(delay_s, times):
    """Fast steps and slow hops: trees come late, verdicts of one turn overtake the next."""
    async with pair(12, delay_s) as fleet:
        for kind in ("code", "json"):
            for _ in range(times):
                text, stats = await answer(fleet, kind, temperature=0.7)
                assert text == expected(kind, 0.7)
                assert stats.lost_drafts == stats.lost_targets == 0


@pytest.mark.slow
async def test_sequences_drafted_together_have_the_text_of_each_alone():
    async with pair(12) as fleet:
        kinds = [*KINDS, *KINDS]
        together = await asyncio.gather(*(answer(fleet, kind, temperature=1.0) for kind in kinds))
    assert [text for text, _ in together] == [expected(kind, 1.0) for kind in kinds]


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("branches", [0, 12])
async def test_draft_tree_is_walked_and_alternatives_are_sometimes_correct(branches):
    async with pair(branches, shortest_step_s=HELD_S if branches else 0.0) as fleet:
        chain_text, chain = await answer(fleet, "code", 1.0)
        tree_text, tree = await answer(fleet, "code", 1.0, alternatives=4)
    assert chain_text == tree_text == expected("code", 1.0)
    assert tree.target_passes < chain.target_passes
    assert tree.continued > 0 or not branches


async def test_draft_worker_without_draft_ahead_interoperates():
    async with pair(0) as fleet:
        text, stats = await answer(fleet, "json", temperature=0.7)
    assert text == expected("json", 0.7)
    assert (stats.prepared_for, stats.continued) == (0, 0)
    assert stats.rounds > 0


@pytest.mark.parametrize(("delay_s", "step_s"), [(0.0, HELD_S), (0.004, 0.0)], ids=["ahead", "crossing"])
async def test_trace_of_rounds_that_the_target_began_has_every_verdict(spans, delay_s, step_s):
    generation = get_tracer("test").start_span("a generation", context_of(TRACEPARENT))
    async with pair(12, delay_s, shortest_step_s=step_s) as fleet:
        _, stats = await answer(fleet, "json", 0.7, generation=generation)
        await eventually(lambda: len(spans.named("verify")) >= stats.target_passes)
    generation.end()
    ids = {span.context.span_id for span in spans}
    assert {span.name for span in spans if span.parent.span_id not in ids} == {"a generation"}
    rounds = spans.named("round")
    assert len(rounds) == stats.rounds
    assert sum(span.attributes["outrider.continued"] for span in rounds) == stats.continued
    assert stats.continued > 0 or not step_s
    for span in [*rounds, *spans.named("plain")]:
        below = {child.name: child for child in spans.below(span)}
        assert span.start_time <= below["verify"].start_time
        assert below["verify"].end_time <= span.end_time
        assert ("draft" in below) is (span.name == "round" and not span.attributes["outrider.continued"])


@pytest.mark.slow  # tests/engine/loading/test_quantized.py has it without the wire
@pytest.mark.parametrize(("role", "bits"), [("draft", "int8"), ("target", "int4")])
async def test_quantized_draft_changes_no_token(role, bits):
    """The small draft, or the target's own copy."""
    of_draft = {"model": str(DEMO / role), "quantization": bits}
    async with pair(12, of_draft=of_draft) as fleet:
        answers = [await answer(fleet, kind, temperature=0.7, alternatives=2) for kind in KINDS]
    assert [text for text, _ in answers] == [expected(kind, 0.7) for kind in KINDS]
    assert sum(stats.accepted for _, stats in answers) > 0


@needs_functions
@pytest.mark.slow
async def test_batch_invariant_numerics_say_the_same_in_bfloat16_with_drafts_and_without():
    async with pair(12, dtype="bfloat16", batch_invariant=True) as fleet:
        kinds = [*KINDS, *KINDS]
        together = await asyncio.gather(
            *(answer(fleet, kind, temperature=1.0, alternatives=2) for kind in kinds)
        )
        alone = [await answer(fleet, kind, temperature=1.0, speculation=OFF) for kind in KINDS]
    texts = [text for text, _ in together]
    assert texts[: len(KINDS)] == texts[len(KINDS) :] == [text for text, _ in alone]
