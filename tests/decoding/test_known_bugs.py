"""Mistakes that others have shipped. Each wrong rule is written out here, and the hypothesis tests catch it.

So it is shown as well that those tests can fail: the right rule passes with the same pair, keys and length.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import outrider.decoding.verify
from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.draft import Draft, SparseProbs, Verdict
from outrider.decoding.noise import gumbel
from outrider.decoding.philox import Purpose, uniform
from outrider.decoding.sampling import choose, process
from outrider.decoding.settings import Sampling
from outrider.decoding.verify import sample_draft_token, verify_block, verify_coupled, verify_rejection
from tests.support.toy import (
    DETECTED,
    FALSE_ALARM,
    Draws,
    Rule,
    Text,
    p_value,
    random_model,
    ratio_texts,
    text_probabilities,
)

# They show that tests/decoding/test_exactness.py can fail, at length.
pytestmark = pytest.mark.slow

LENGTH = 5
KEYS = range(5 * 10**6, 5 * 10**6 + 2500)
TARGET, DRAFT = random_model(4, seed=1), random_model(4, seed=2)


def p_value_of(
    verify: Rule,
    draw: Draws = sample_draft_token,
    target: Tensor = TARGET,
    draft: Tensor = DRAFT,
    sampling: Sampling | None = None,
    depth: int = 2,
) -> float:
    sampling = sampling or Sampling()
    texts, _ = ratio_texts(target, draft, sampling, KEYS, LENGTH, depth, verify, draw)
    return p_value(texts, text_probabilities(target, sampling, LENGTH))


@pytest.fixture
def keyed_by() -> Iterator[Callable[[Callable[[int, int, int, Purpose], float]], None]]:
    """Replaces what random numbers hang on, until the test is over."""
    with pytest.MonkeyPatch.context() as patch:
        yield lambda number: patch.setattr(outrider.decoding.verify, "uniform", number)


def test_right_rules_pass_where_the_wrong_ones_below_fail() -> None:
    assert p_value_of(verify_rejection) > FALSE_ALARM
    assert p_value_of(verify_block) > FALSE_ALARM


def test_residual_of_the_target_against_itself() -> None:
    def wrong(draft: Draft, target_probs: Tensor, noise_key: int, position: int, round: int) -> Verdict:
        verdict = verify_rejection(draft, target_probs, noise_key, position, round)
        accepted = len(verdict.accepted)
        if accepted == len(draft):
            return verdict
        # Nothing is left of target - target, and what softening makes of nothing is uniform.
        token = int(uniform(noise_key, position + accepted, round, Purpose.RESIDUAL) * target_probs.shape[1])
        return Verdict(verdict.accepted, (*verdict.tokens[:-1], token))

    assert p_value_of(wrong) < DETECTED


def test_p_value_of_a_residual_without_the_draft_is_low() -> None:
    def wrong(draft: Draft, target_probs: Tensor, noise_key: int, position: int, round: int) -> Verdict:
        verdict = verify_rejection(draft, target_probs, noise_key, position, round)
        accepted = len(verdict.accepted)
        own = verify_rejection(Draft(), target_probs[accepted:][:1], noise_key, position + accepted, round)
        return Verdict(verdict.accepted, (*verdict.tokens[:-1], *own.tokens))

    assert p_value_of(wrong) < DETECTED


@pytest.mark.slow
def test_ratio_to_raw_probabilities_of_a_draft_that_sampled_from_truncated_ones() -> None:
    raw = DRAFT.softmax(dim=1)

    def wrong(processed: Tensor, noise_key: int, position: int, round: int) -> tuple[int, SparseProbs]:
        token, _ = sample_draft_token(processed, noise_key, position, round)
        # The row of the table that was processed, found by the logits that truncation has left.
        (context,) = [
            index
            for index in range(4)
            if torch.equal(DRAFT[index][processed > -torch.inf], processed[processed > -torch.inf])
        ]
        return token, SparseProbs(tuple(range(4)), tuple(raw[context].tolist()))

    top_k = Sampling(top_k=3)
    assert p_value_of(verify_rejection, sampling=top_k) > FALSE_ALARM
    assert p_value_of(verify_rejection, draw=wrong, sampling=top_k) < DETECTED
    assert p_value_of(verify_block, draw=wrong, sampling=top_k) < DETECTED


@pytest.mark.slow
def test_draft_noise_shared_with_acceptance_and_residual(keyed_by) -> None:  # type: ignore[no-untyped-def]
    keyed_by(lambda key, position, round, purpose: uniform(key, position, round, Purpose.DRAFT))
    assert p_value_of(verify_rejection) < DETECTED
    assert p_value_of(verify_block) < DETECTED


def test_draft_noise_shared_with_the_residual_alone(keyed_by) -> None:  # type: ignore[no-untyped-def]
    def shared(key, position, round, purpose):  # type: ignore[no-untyped-def]
        return uniform(key, position, round, Purpose.DRAFT if purpose == Purpose.RESIDUAL else purpose)

    keyed_by(shared)
    assert p_value_of(verify_rejection) < DETECTED


@pytest.mark.slow
def test_block_verification_keyed_by_position_alone(keyed_by) -> None:  # type: ignore[no-untyped-def]
    # It looks at positions that the next round drafts again, and then meets the numbers it has already used.
    target, draft = random_model(2, 1, spread=2.0), random_model(2, 51, spread=2.0)
    assert p_value_of(verify_block, target=target, draft=draft, depth=4) > FALSE_ALARM
    keyed_by(lambda key, position, round, purpose: uniform(key, position, 0, purpose))
    assert p_value_of(verify_block, target=target, draft=draft, depth=4) < DETECTED


def test_p_value_of_a_draft_that_ignores_temperature_is_low() -> None:
    def wrong(processed: Tensor, noise_key: int, position: int, round: int) -> tuple[int, SparseProbs]:
        token, _ = sample_draft_token(processed * 0.5, noise_key, position, round)
        return token, sample_draft_token(processed, noise_key, position, round)[1]

    cool = Sampling(temperature=0.5)
    assert p_value_of(verify_rejection, sampling=cool) > FALSE_ALARM
    assert p_value_of(verify_rejection, draw=wrong, sampling=cool) < DETECTED


def test_sampling_in_half_precision_against_a_ratio_in_single() -> None:
    # Too small a difference for a few thousand texts, hence by its exact output: each token is emitted as
    # often as it is drafted and accepted, or drawn from the residual.
    def emitted(drawn_from: Tensor, reported: Tensor, target: Tensor) -> Tensor:
        accepted = drawn_from * (target / reported).clamp(max=1.0)
        residual = (target - reported).clamp(min=0.0)
        return accepted + (1 - accepted.sum()) * residual / residual.sum()

    target, draft = (model[0].double().softmax(dim=0) for model in (TARGET, DRAFT))
    half = DRAFT[0].bfloat16().softmax(dim=0).double()
    half /= half.sum()
    assert (emitted(half, draft, target) - target).abs().sum() > 1e-4
    # What is reported is what was drawn from: float32 logits, also when the draft computes in half precision.
    rows = [ChoiceContext(Sampling(), 0, 1, (0,), ())]
    _, probs = sample_draft_token(process(DRAFT[:1].bfloat16(), rows)[0], 0, 1, 0)
    reported = torch.zeros(4, dtype=torch.float64)
    reported[list(probs.token_ids)] = torch.tensor(probs.probs, dtype=torch.float64)
    drawn_from = DRAFT[0].bfloat16().float().double().softmax(dim=0)
    assert (emitted(drawn_from, reported, target) - target).abs().sum() < 1e-6


def dropping(verify: Rule) -> Rule:
    """Drops the chain from the first token on that its own draft finds unlikely."""

    def wrong(draft: Draft, target_probs: Tensor, noise_key: int, position: int, round: int) -> Verdict:
        kept = 0
        for token, probs in zip(draft.tokens, draft.draft_probs, strict=True):
            if dict(zip(probs.token_ids, probs.probs, strict=True))[token] < 0.5:
                break
            kept += 1
        shorter = Draft.chain(draft.tokens[:kept], draft.draft_probs[:kept])
        return verify(shorter, target_probs[: kept + 1], noise_key, position, round)

    return wrong


def test_dropping_drafted_tokens_for_their_own_probability() -> None:
    target = torch.tensor([[0.5, 0.5]] * 2).log()
    draft = torch.tensor([[0.8, 0.2]] * 2).log()
    assert p_value_of(verify_rejection, target=target, draft=draft) > FALSE_ALARM
    assert p_value_of(dropping(verify_rejection), target=target, draft=draft) < DETECTED
    assert p_value_of(dropping(verify_block), target=target, draft=draft) < DETECTED


def test_coupled_rule_may_drop_drafted_tokens_for_any_reason() -> None:
    chosen = [2, 0, 3, 1]
    whole = verify_coupled(Draft.chain([2, 0, 3]), chosen)
    for kept in range(4):
        verdict = verify_coupled(Draft.chain([2, 0, 3][:kept]), chosen[: kept + 1])
        assert verdict.tokens == whole.tokens[: len(verdict.tokens)]


def test_token_0_taken_for_none() -> None:
    def wrong(draft: Draft, target_probs: Tensor, noise_key: int, position: int, round: int) -> Verdict:
        kept = next((node for node, token in enumerate(draft.tokens) if not token), len(draft))
        shorter = Draft.chain(draft.tokens[:kept], draft.draft_probs[:kept])
        return verify_rejection(shorter, target_probs[: kept + 1], noise_key, position, round)

    assert p_value_of(wrong) < DETECTED
    assert verify_coupled(Draft.chain([0, 0]), [0, 0, 0]) == Verdict((0, 1), (0, 0, 0))
    assert verify_coupled(Draft((1, 0), (-1, -1)), [0, 9, 0]) == Verdict((1,), (0, 0))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(min_p=0.3),
        Sampling(logit_bias={2: 3.0}),
        Sampling(frequency_penalty=2.0),
        Sampling(repetition_penalty=3.0),
    ],
    ids=["min_p", "logit_bias", "frequency_penalty", "repetition_penalty"],
)
def test_settings_honoured_on_the_last_position_only(sampling: Sampling) -> None:
    def texts(settings_apply_at: Callable[[int], bool]) -> list[Text]:
        """Three tokens per key: two drafted ones, here always right, and the target's own after them."""
        drawn: list[Text] = [()] * len(KEYS)
        for position in range(3):
            rows = [
                ChoiceContext(sampling, key, position, (0,), (), path)
                for key, path in zip(KEYS, drawn, strict=True)
            ]
            logits = TARGET[[(0, *path)[-1] for path in drawn]]
            values = process(logits, rows) if settings_apply_at(position) else logits
            tokens = choose(values, rows).tolist()
            drawn = [(*path, token) for path, token in zip(drawn, tokens, strict=True)]
        return drawn

    probs = text_probabilities(TARGET, sampling, 3)
    assert p_value(texts(lambda position: True), probs) > FALSE_ALARM
    assert p_value(texts(lambda position: position == 2), probs) < DETECTED


def test_planted_noise_that_ignores_the_prompt_is_noticed() -> None:
    # The noise of a key alone, the same key for all: a thousand prompts with one distribution say one thing.
    probs: dict[Text, float] = {(0,): 0.5, (1,): 0.5}
    same = (torch.zeros(1000, 2) + gumbel([1234], [0], 2)).argmax(dim=1)
    assert p_value([(int(token),) for token in same], probs) < DETECTED
