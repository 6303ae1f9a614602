"""What a Verdict says: accepted nodes, the target's own token, and what is refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.draft import ROOT, Draft, SparseProbs, Verdict
from outrider.decoding.gumbel_max import gumbel_max
from outrider.decoding.sampling import choose, probabilities, process
from outrider.decoding.settings import SMALLEST_TEMPERATURE, Sampling
from outrider.decoding.verify import sample_draft_token, verify_block, verify_coupled, verify_rejection

OPT_IN_RULES = [verify_rejection, verify_block]
SURE_OF_ZERO = SparseProbs((0,), (1.0,))


@pytest.mark.parametrize(
    ("chosen", "accepted", "tokens"),
    [
        ([5, 6, 7, 8], (0, 1, 2), (5, 6, 7, 8)),
        ([5, 6, 0, 8], (0, 1), (5, 6, 0)),
        ([5, 0, 7, 8], (0,), (5, 0)),
        ([0, 6, 7, 8], (), (0,)),
    ],
)
def test_chain_stands_up_to_the_first_difference(
    chosen: list[int], accepted: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    assert verify_coupled(Draft.chain([5, 6, 7]), chosen) == Verdict(accepted, tokens)


def test_tree_stands_along_the_branch_that_the_target_takes() -> None:
    #       ROOT ─ 0:5 ─ 2:6
    #            └ 1:0 ─ 3:6 ─ 4:0
    tree = Draft((5, 0, 6, 6, 0), (ROOT, ROOT, 0, 1, 3))
    assert verify_coupled(tree, [0, 9, 6, 9, 0, 3]) == Verdict((1, 3, 4), (0, 6, 0, 3))
    assert verify_coupled(tree, [5, 7, 6, 9, 0, 3]) == Verdict((0,), (5, 7))
    assert verify_coupled(tree, [7, 7, 6, 9, 0, 3]) == Verdict((), (7,))


def test_verify_without_a_draft_gives_the_targets_token() -> None:
    assert verify_coupled(Draft(), [3]) == Verdict((), (3,))


@given(st.lists(st.integers(0, 2), max_size=6), st.data())
def test_coupled_verdict_is_what_the_target_says_on_its_own(tokens: list[int], data: st.DataObject) -> None:
    # A target whose next token is a function of the text before it.
    says = data.draw(st.functions(like=lambda *text: None, returns=st.integers(0, 2), pure=True))
    chosen = [says(*tokens[:reached]) for reached in range(len(tokens) + 1)]
    verdict = verify_coupled(Draft.chain(tokens), chosen)
    for reached, token in enumerate(verdict.tokens):
        assert token == says(*verdict.tokens[:reached])
    assert len(verdict.tokens) == len(verdict.accepted) + 1


def test_coupled_rule_needs_a_token_per_node() -> None:
    with pytest.raises(ValueError, match="chosen has 2 tokens: give 3"):
        verify_coupled(Draft.chain([1, 2]), [1, 2])


@pytest.mark.parametrize("verify", OPT_IN_RULES)
def test_rejection_or_block_refuses_what_it_cannot_verify(verify) -> None:  # type: ignore[no-untyped-def]
    probs = torch.full((3, 2), 0.5)
    with pytest.raises(ValueError, match="chain with draft_probs"):
        verify(Draft.chain([0, 1]), probs, 0, 0, 0)
    with pytest.raises(ValueError, match="chain with draft_probs"):
        verify(Draft((0, 1), (ROOT, ROOT)), probs, 0, 0, 0)
    with pytest.raises(ValueError, match="target_probs has 3 rows: give 2"):
        verify(Draft.chain([0], [SURE_OF_ZERO]), probs, 0, 0, 0)
    with pytest.raises(ValueError, match=r"draft_probs\[0\] must hold the drafted token 1"):
        verify(Draft.chain([1], [SURE_OF_ZERO]), probs[:2], 0, 0, 0)


@pytest.mark.parametrize("verify", OPT_IN_RULES)
def test_greedy_under_rejection_or_block_accepts_exactly_the_likeliest(verify) -> None:  # type: ignore[no-untyped-def]
    one_hot = torch.eye(4)[[2, 0, 3]]
    two, zero, one = (SparseProbs((token,), (1.0,)) for token in (2, 0, 1))
    for key in range(50):
        assert verify(Draft.chain([2, 0], [two, zero]), one_hot, key, 5, 0) == Verdict((0, 1), (2, 0, 3))
        assert verify(Draft.chain([2, 1], [two, one]), one_hot, key, 5, 0) == Verdict((0,), (2, 0))


@pytest.mark.parametrize("verify", OPT_IN_RULES)
def test_rejection_or_block_accepts_everything_from_a_draft_equal_to_the_target(verify) -> None:  # type: ignore[no-untyped-def]
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    probs = logits.softmax(dim=0).expand(3, -1)
    for key in range(200):
        drawn = [sample_draft_token(logits, key, position, 0) for position in (5, 6)]
        draft = Draft.chain([token for token, _ in drawn], [probs for _, probs in drawn])
        assert len(verify(draft, probs, key, 5, 0).accepted) == 2


def test_drafted_token_comes_with_the_distribution_it_was_drawn_from() -> None:
    processed = torch.tensor([0.0, -torch.inf, 1.0])
    token, probs = sample_draft_token(processed, 1, 2, 3)
    assert token in probs.token_ids
    assert dict(zip(probs.token_ids, probs.probs, strict=True)) == pytest.approx(
        {0: 0.26894142, 2: 0.73105858}
    )


def test_large_support_is_cut_and_its_distribution_still_sums_to_1() -> None:
    processed = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    token, probs = sample_draft_token(processed, 1, 2, 3)
    assert len(probs.token_ids) == 256
    assert set(probs.token_ids) == set(processed.topk(256).indices.tolist())
    assert sum(probs.probs) == pytest.approx(1.0, abs=1e-12)
    assert token in probs.token_ids


def test_prefix_whose_leftover_is_lost_beside_1_stands() -> None:
    target = torch.tensor([[1.0, 1e-30], [1.0, 1e-30], [1.0, 0.0]], dtype=torch.float64)
    verdict = verify_block(Draft.chain([0, 0], [SURE_OF_ZERO, SURE_OF_ZERO]), target, 1, 0, 0)
    assert verdict == Verdict((0, 1), (0, 0, 0))


NUMBERS = st.sampled_from([0.0, 1.5, -3.0, 3e38, -3e38, math.inf, -math.inf, math.nan])
ROWS = st.lists(NUMBERS, min_size=4, max_size=4)
ASKED = st.sampled_from(
    [
        {},
        {"temperature": 0.0},
        {"temperature": SMALLEST_TEMPERATURE},
        {"top_k": 2},
        {"top_p": 0.5, "min_p": 0.1},
        {"logit_bias": {1: 1e4}, "repetition_penalty": 0.01},
        {"allowed_token_ids": (2,)},
        {"bad_token_ids": (0, 1, 2, 3)},
    ]
)


@given(st.lists(ROWS, min_size=3, max_size=3), ASKED, st.sampled_from(["rejection", "block"]))
@settings(max_examples=300, deadline=None)
def test_verify_with_any_logits_gives_a_token_of_the_vocabulary(rows, asked, rule):
    """NaN, infinity and rows without a token left: nothing raises, and no id lies outside."""
    logits = torch.tensor(rows)
    for verification in ("coupled", rule):
        sampling = Sampling(verification=verification, **asked)
        at = [ChoiceContext(sampling, 5, position, (0,), ()) for position in range(3)]
        processed = process(logits, at)
        assert all(0 <= token < 4 for token in choose(processed, at).tolist())
        assert all(0 <= token < 4 for token in gumbel_max(processed, at, 2)[0].flatten().tolist())
        probs = probabilities(processed)
        assert probs.isfinite().all()
        assert probs.sum(dim=1).tolist() == pytest.approx([1.0] * 3)
        drawn = [sample_draft_token(processed[i], 5, i, 1) for i in range(2)]
        for token, support in drawn:
            support.check(token, 4)
        draft = Draft.chain([token for token, _ in drawn], [support for _, support in drawn])
        for verify in (verify_rejection, verify_block):
            assert all(0 <= token < 4 for token in verify(draft, probs, 5, 0, 1).tokens)
