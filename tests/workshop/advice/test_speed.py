"""What is expected of rounds follows from what they bring and what they cost."""

from dataclasses import dataclass, replace
from random import Random

import pytest

from outrider.drafters.registry import Place, drafter
from outrider.engine.planning.accelerators import ACCELERATORS
from outrider.engine.planning.step_costs import StepCosts
from outrider.pace.acceptance import expected_tokens
from outrider.pace.step import StepSize
from workshop.advice.advice import Advice, Finding, Judgement
from workshop.advice.judged import Counts, DraftStart, JudgedAnswer, counted
from workshop.advice.speed import Expected, ExpectedCosts, Prices, could_pay, expected, round_time
from workshop.advice.steps import DataSheetSteps, MeasuredSteps

TARGET_S, DRAFT_S, ROUND_S = 20e-3, 1e-3, 2e-3


@dataclass(frozen=True)
class Flat:
    """Steps that take the same up to so many tokens, and beyond by the token."""

    each_s: float
    free: float = 64.0

    def seconds(self, sequences: float, tokens: float) -> float:
        return self.each_s * max(tokens / self.free, 1.0)


def counts(correct: int, depth: int, asked_share: float = 1.0) -> Counts:
    """So many of the drafted tokens stand in each of ten rounds."""
    tokens = tuple(range(1 + 10 * (min(correct, depth) + 1)))
    found = counted([JudgedAnswer(tokens, (DraftStart(depth, correct),) * len(tokens))], depth)
    found.asked = round(asked_share * found.rounds)
    return found


def costs(name: str = "model", hidden: float = 0.0, **of_target: float) -> ExpectedCosts:
    return ExpectedCosts(
        target=Flat(TARGET_S, **of_target),
        drafter=drafter(name),
        draft=None if name == "ngram" else Flat(DRAFT_S),
        round_s=ROUND_S,
        hidden=hidden,
    )


def test_round_takes_the_drafts_steps_the_targets_and_the_rest() -> None:
    assert round_time(counts(4, 4), costs(), 1) == pytest.approx(TARGET_S + 4.5 * DRAFT_S + ROUND_S)
    assert round_time(counts(4, 4), costs("parallel"), 1) == pytest.approx(TARGET_S + 1.5 * DRAFT_S + ROUND_S)
    assert round_time(counts(4, 4), costs("ngram"), 1) == pytest.approx(TARGET_S + ROUND_S)


def test_rounds_with_drafts_in_verdicts_do_not_wait_for_the_gateway() -> None:
    medusa = drafter("medusa")
    of_draft = (medusa.steps_per_draft + 4 * medusa.steps_per_token) * DRAFT_S
    assert round_time(counts(4, 4), costs("medusa"), 1) == pytest.approx(TARGET_S + of_draft)


def test_rounds_for_which_the_model_is_not_asked_cost_none_of_its_steps() -> None:
    half = counts(4, 4, asked_share=0.5)
    assert round_time(half, costs(), 1) == pytest.approx(TARGET_S + 0.5 * 4.5 * DRAFT_S + ROUND_S)


def test_draft_ahead_hides_a_share_of_drafting() -> None:
    alone = 4.5 * DRAFT_S + ROUND_S
    assert round_time(counts(4, 4), costs(hidden=0.6), 1) == pytest.approx(TARGET_S + 0.4 * alone)


def test_best_depth_is_where_a_token_more_no_longer_pays() -> None:
    by_depth = {depth: counts(3, depth) for depth in range(1, 9)}
    best = expected(by_depth, costs(), 1)
    assert best.depth == 3
    assert best.speedup == pytest.approx(4 * TARGET_S / (TARGET_S + 3.5 * DRAFT_S + ROUND_S))
    assert best.tokens_per_s == pytest.approx(best.speedup / TARGET_S)


def test_plain_decoding_is_best_where_tokens_cost_what_they_bring() -> None:
    by_depth = {depth: counts(1, depth) for depth in range(1, 9)}
    best = expected(by_depth, costs(free=8.0), 128)
    assert (best.depth, best.tokens_per_pass, best.speedup) == (0, 1.0, 1.0)
    assert best.tokens_per_s == pytest.approx(8 / TARGET_S)


def test_drafter_as_costly_as_the_target_could_not_pay() -> None:
    like_target = replace(costs(), draft=Flat(TARGET_S))
    assert not could_pay(like_target, depth=8, streams=1)
    assert could_pay(costs(), depth=8, streams=1)
    parallel = replace(costs("parallel"), draft=Flat(TARGET_S))  # a step for a whole Draft
    assert could_pay(parallel, depth=8, streams=1)
    assert not could_pay(parallel, depth=1, streams=1)


def test_measured_steps_are_told_between_sizes_and_beyond_by_the_sequence() -> None:
    steps = MeasuredSteps({1: {1: 1.0, 3: 2.0}, 8: {8: 4.0, 24: 8.0}})
    assert steps.seconds(1, 2) == 1.5
    assert steps.seconds(8, 16) == 6.0
    assert steps.seconds(4, 16) == 6.0
    assert steps.seconds(32, 32) == 16.0


def test_data_sheet_tells_of_tokens_as_they_are_shared_out() -> None:
    step = StepCosts(10**9, 100.0, 2e9, 10.0, kernels=0)
    steps, card = DataSheetSteps(step, ACCELERATORS["L4"], context=512), ACCELERATORS["L4"]
    verified, plain = (StepSize(8, tokens, context_tokens=8 * 512) for tokens in (40, 8))
    assert steps.seconds(8, 40) == step.seconds(card, verified)
    assert steps.seconds(8, 8) == step.seconds(card, plain, is_early=True)


def test_million_tokens_cost_the_hours_of_the_devices_that_say_them() -> None:
    prices = Prices(target=36.0, draft=3.6)
    assert prices.per_million_tokens(100.0, with_draft=False) == pytest.approx(100.0)
    assert prices.per_million_tokens(100.0, with_draft=True) == pytest.approx(110.0)
    assert Prices(None, 3.6).per_million_tokens(100.0, with_draft=True) is None


def judgement(name: str, speedups: tuple[float, ...], correct: int, draft_s: float | None) -> Judgement:
    pairs = zip((1, 8), speedups, strict=True)
    found = tuple(Expected(streams, 4, 3.0, 100.0, speedup) for streams, speedup in pairs)
    finding = Finding("code", 0.7, {4: counts(correct, 4)}, found)
    of_model = replace(costs(), draft=None if draft_s is None else Flat(draft_s))
    return Judgement(name, "model", Place.DRAFT_WORKER, of_model, 10**9, 10**8, (finding,), (None, None))


def advice(*judgements: Judgement) -> Advice:
    return Advice("big", (1, 8), True, 20.0, (None, None), judgements=[*judgements])


def test_best_is_recommended_in_a_sentence() -> None:
    found = advice(judgement("small", (2.0, 1.5), 3, 1e-3), judgement("smaller", (3.0, 1.2), 3, 5e-4))
    assert [candidate.name for candidate in found.ranking] == ["smaller", "small"]
    assert found.recommendation == (
        "Take smaller: depth 4, expected 3.00 at 1 and 1.20 at 8 streams times plain decoding."
    )


def test_rule_of_thumb_is_checked() -> None:
    slow, poor = judgement("slow", (1.5, 1.1), 3, 5e-3), judgement("poor", (1.4, 1.1), 0, None)
    assert slow.warnings == ["only 4.0 times faster than the target, not 10"]
    assert poor.warnings == ["acceptance 0.00, below 0.5"]
    assert "though it is only 4.0 times faster" in advice(slow, poor).recommendation


def test_advice_without_a_gain_recommends_plain_decoding() -> None:
    found = advice(judgement("small", (1.0, 1.0), 1, 1e-3))
    assert found.recommendation.startswith("Stay with plain decoding: the best candidate, small, ")
    assert advice().recommendation.startswith("Stay with plain decoding: no candidate")


def test_chains_of_one_rate_are_foretold_as_by_the_formula() -> None:
    random, tokens = Random(7), tuple(range(40_000))
    starts = [DraftStart(0, 0)] * len(tokens)
    correct = 0
    for place in reversed(range(1, len(tokens))):
        correct = correct + 1 if random.random() < 0.7 else 0
        starts[place] = DraftStart(5, min(correct, 5))
    found = counted([JudgedAnswer(tokens, tuple(starts))], depth=5)
    assert found.tokens_per_pass == pytest.approx(expected_tokens(0.7, 5), rel=0.02)
