"""Trees of target drafters: their nodes, the same text, and what alternatives would bring."""

import math
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.draft import ROOT, Draft
from outrider.decoding.outcomes import RANKS
from outrider.decoding.philox import noise_key
from outrider.decoding.sampling import choose
from outrider.decoding.settings import Sampling
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.drafters.trees import Trees
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.sequence import EngineSequence
from outrider.learning.agreement import agreement
from tests.support.demo_pair import DRAFTERS, engine, prompt_of
from tests.support.eagle3 import Form, Reference, hidden_of, reference, write_eagle3
from tests.support.simulated_cuda.counts import Counts
from tests.support.simulated_cuda.install import needs_compiler, simulated_cuda
from tests.support.target_drafters import KINDS, TOKENS, drafted_texts, engine_with, plain_texts, rounds

VOCABULARY = 12
TARGETS: dict[str, Callable[[], Engine]] = {
    "medusa": lambda: engine_with("medusa", DRAFTERS / "medusa"),
    "eagle3": lambda: engine_with("eagle3", DRAFTERS / "eagle3"),
    "early_exit": lambda: engine_with("early_exit", own={"layers": 4}),
}


@cache
def target_with(kind: str) -> Engine:
    return TARGETS[kind]()


def text(temperature: float = 0.0, ends: frozenset[int] = frozenset(), **settings: object) -> EngineSequence:
    sampling = Sampling.model_validate({"temperature": temperature, **settings})
    return EngineSequence(0, 2, noise_key(1, 0, (1, 2)), sampling, ends, 100, tokens=[1, 2])


def grown(request: DraftRequest, shares: list[dict[int, float]]) -> tuple[Draft, list[list[int]]]:
    """The Draft of a drafter with these probabilities at each position, and how the tree was fed, by pass."""
    trees, fed = Trees([request]), []
    for of_position in shares:
        if not trees.growing:
            break
        logits = torch.full((VOCABULARY,), -50.0)
        for token, share in of_position.items():
            logits[token] = math.log(share)
        trees.grow(logits.expand(len(trees.growing), -1).clone())
        fed += [feed.tokens for feed in trees.feeds()]
    return trees.drafts()[0], fed


def paths(draft: Draft) -> list[tuple[int, ...]]:
    return [tuple(draft.tokens[above] for above in draft.path(node)) for node in range(len(draft))]


def test_beside_the_chain_stand_the_nodes_of_the_largest_joint_probability() -> None:
    shares = [{3: 0.5, 4: 0.4, 5: 0.1}, {6: 0.7, 7: 0.3}, {8: 0.9, 9: 0.1}]
    draft, _ = grown(DraftRequest(text(), 3, 3), shares)
    assert paths(draft)[:3] == [(3,), (3, 6), (3, 6, 8)]
    # 0.4, 0.28 and 0.252, before 0.15 of (3, 7).
    assert sorted(paths(draft)[3:]) == [(4,), (4, 6), (4, 6, 8)]


def test_alternative_of_a_sure_position_gives_way_to_a_later_alternative() -> None:
    shares = [{3: 0.98, 4: 0.02}, {6: 0.6, 7: 0.4}]
    draft, _ = grown(DraftRequest(text(), 2, 1), shares)
    assert paths(draft) == [(3,), (3, 6), (3, 7)]


def test_no_more_nodes_are_fed_than_are_asked_for_and_later_positions_have_their_part() -> None:
    even = {3: 0.26, 4: 0.25, 5: 0.25, 6: 0.24}
    draft, fed = grown(DraftRequest(text(), 4, 4), [even] * 4)
    assert len(draft) == 8
    assert [len(tokens) for tokens in fed] == [1 + 2, 1 + 1, 1 + 0]


def test_tree_of_a_block_has_the_nodes_of_the_largest_joint_probability() -> None:
    """Every parent of a depth has the same children, as in the trees of DDTree and JetSpec."""
    halves = {8: 0.5, 9: 0.5}
    shares = [{3: 0.26, 4: 0.25, 5: 0.25, 6: 0.24}, {7: 0.99, 8: 0.01}, halves, halves]
    trees = Trees([DraftRequest(text(), 4, 6)], is_free=True)
    for of_position in shares:
        logits = torch.full((VOCABULARY,), -50.0)
        logits[[*of_position]] = torch.tensor([*of_position.values()]).log()
        trees.grow(logits.expand(len(trees.growing), -1).clone())
    (draft,) = trees.drafts()
    joint = {
        path: math.prod(of_position[token] for token, of_position in zip(path, shares, strict=False))
        for depth in (1, 2, 3, 4)
        for path in product(*shares[:depth])
    }
    chain = [(3,), (3, 7), (3, 7, 8), (3, 7, 8, 8)]
    best = sorted({*joint} - {*chain}, key=lambda path: -joint[path])[:6]
    assert paths(draft)[:4] == chain
    assert {*paths(draft)[4:]} == {*best}


def test_tree_ends_where_it_would_not_survive() -> None:
    shares = [{3: 0.9, 4: 0.1}, {6: 0.5, 7: 0.5}, {8: 0.5, 9: 0.5}]
    deep, shallow = (grown(DraftRequest(text(), 3, least_survival=least), shares)[0] for least in (0.0, 0.95))
    assert paths(deep) == [(3,), (3, 6), (3, 6, 8)]
    assert paths(shallow) == [(3,), (3, 6)]  # after it a token survives with 0.45, twice less than is asked


def test_node_is_fed_with_the_branch_that_it_is_on() -> None:
    asked = text()
    asked.cached, asked.blocks = 1, HeldBlocks([0])
    trees = Trees([DraftRequest(asked, 4, 4)])
    logits = torch.full((VOCABULARY,), -torch.inf)
    logits[3:5] = torch.tensor([0.6, 0.4]).log()
    fed = 0
    for expected in ([(3,), (4,)], [(3, 3), (4, 3), (3, 4)], [(3, 3, 3)]):
        trees.grow(logits.expand(len(trees.growing), -1).clone())
        (feed,) = trees.feeds(between=1)
        assert feed.tree is not None
        assert sorted(paths(feed.tree)[-len(feed.tokens) :]) == sorted(expected)
        assert feed.tree.tokens[-len(feed.tokens) :] == (*feed.tokens,)
        assert (feed.start, len(feed.tree)) == (1 + 1 + fed, fed + len(feed.tokens))
        fed += len(feed.tokens)


@needs_compiler
def test_position_costs_a_gpu_one_copy_in_and_one_wait() -> None:
    shares = [0.3, 0.3, 0.2, 0.2] + [0.0] * (VOCABULARY - 4)
    logits = torch.tensor(shares).clamp(min=1e-9).log()
    asked = [DraftRequest(text(0.7, top_p=0.9), 3, 3), DraftRequest(text(0.0), 2, 2)]
    with simulated_cuda() as cuda:
        trees = Trees(asked)
        for _ in range(2):
            given = logits.expand(len(trees.growing), -1).to("cuda")
            cuda.counts = Counts()
            trees.grow(given)
            totals = cuda.counts.totals()
            assert [totals[kind] for kind in ("pinned_copies", "waits", "copies_out")] == [1, 1, 1]
            assert totals["pageable_copies"] == 0
        on_gpu = trees.drafts()
    trees = Trees(asked)
    for _ in range(2):
        trees.grow(logits.expand(len(trees.growing), -1).clone())
    assert on_gpu == trees.drafts()
    assert not on_gpu[0].is_chain


def test_nothing_follows_an_end_of_the_generation() -> None:
    shares = [{3: 0.6, 4: 0.4}, {6: 0.9, 7: 0.1}]
    draft, _ = grown(DraftRequest(text(ends=frozenset({3})), 2, 3), shares)
    assert paths(draft) == [(3,), (4,), (4, 6), (4, 7)]


def test_tokens_that_settings_ban_are_no_alternatives() -> None:
    draft, _ = grown(DraftRequest(text(1.0, top_k=2), 1, 4), [{3: 0.5, 4: 0.3, 5: 0.2}])
    assert sorted(draft.tokens) == [3, 4]


def test_alternatives_under_noise_are_best_by_perturbed_logits() -> None:
    """Not those that are likely without it: the noise of the target's choice is known."""
    flat = dict.fromkeys(range(VOCABULARY), 1.0 / VOCABULARY)
    asked = text(1.0)
    draft, _ = grown(DraftRequest(asked, 1, 2), [flat])
    logits, best = torch.zeros(1, VOCABULARY), list[int]()
    for _ in range(3):
        row = ChoiceContext(asked.sampling, asked.noise_key, 2, (), ())
        best.append(int(choose(logits.clone(), [row])))
        logits[0, best[-1]] = -torch.inf
    assert list(draft.tokens) == best


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_under_rejection_or_block_there_are_chains_alone(rule: str) -> None:
    even = {3: 0.26, 4: 0.25, 5: 0.25, 6: 0.24}
    draft, _ = grown(DraftRequest(text(1.0, verification=rule), 3, 4), [even] * 3)
    assert draft.is_chain
    assert len(draft) == len(draft.draft_probs) == 3


def expected_paths(
    head: Reference, tokens: list[int], length: int, depth: int, alternatives: int, sampling: Sampling
) -> set[tuple[int, ...]]:
    """Paths of a tree by plain arithmetic: each path is computed alone, from the text."""
    hidden = hidden_of(tokens, head.form.layers)[:-1]
    chain: tuple[int, ...] = ()
    beside: list[tuple[float, tuple[int, ...]]] = []
    going_on: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    to_feed = alternatives
    for position in range(depth):
        found = []
        for score, path in going_on:
            best, values = head.best_after(
                hidden, tokens, [*path], min(alternatives + 1, RANKS), sampling, length
            )
            shares = values.log_softmax(0).tolist()
            found += [
                (score + share, (*path, token)) for token, share in zip(best.tolist(), shares, strict=True)
            ]
        chain, chain_score = next((path, score) for score, path in found if path[:-1] == chain)
        found = [path for path in found if path[1] != chain]
        beside = sorted([*beside, *found], key=lambda path: -path[0])[:alternatives]
        passes = depth - 1 - position
        quota = -(-to_feed // passes) if passes else 0
        following = [path for path in beside if path in found][:quota]
        to_feed -= len(following)
        going_on = [(chain_score, chain), *following]
    return {chain[: end + 1] for end in range(depth)} | {path for _, path in beside}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@torch.inference_mode()
def test_eagle_tree_is_that_of_plain_arithmetic(tmp_path: Path, temperature: float) -> None:
    """Nodes of a position go through the head together: none may see another branch."""
    form = Form(attention=3.0)  # much of what is guessed comes from the drafted tokens before
    target, head = engine_with("eagle3", write_eagle3(tmp_path, form)), reference(form)
    sampling, compared = Sampling(temperature=temperature), 0
    for kind in ("json", "code"):
        prompt = prompt_of(kind)
        (found,) = rounds(target, [prompt], temperature, depth=4, alternatives=5)
        tokens = [*prompt, *found.tokens]
        for length, draft in list(zip(found.lengths, found.drafts, strict=True))[:8]:
            expected = expected_paths(head, tokens[:length], len(prompt), draft.depth, 5, sampling)
            assert {*paths(draft)} == expected
            compared += any(draft.depths[node] > 0 and draft.parents[node] >= 4 for node in range(len(draft)))
    assert compared > 3  # had a branch that goes on


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize(
    "temperature", [0.7, *(pytest.param(temperature, marks=pytest.mark.slow) for temperature in (0.0, 1.0))]
)
def test_text_is_the_same_with_trees_and_takes_fewer_passes_than_with_chains(
    kind: str, temperature: float
) -> None:
    target = target_with(kind)
    trees = drafted_texts(target, temperature, depth=4, company=6, alternatives=6)
    assert [text.tokens for text in trees] == plain_texts(temperature)
    chains = drafted_texts(target, temperature, depth=4, company=6)
    assert sum(text.rounds for text in trees) < sum(text.rounds for text in chains)
    assert any(not draft.is_chain for text in trees for draft in text.drafts)
    assert all(len(draft) <= draft.depth + 6 for text in trees for draft in text.drafts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("company", [1, 32])
def test_trees_change_no_text_alone_or_in_company(kind: str, temperature: float, company: int) -> None:
    prompts = [prompt_of(name, index) for name in KINDS for index in range(6)][:32]
    settings = Sampling(max_tokens=TOKENS, ignore_eos=True, temperature=temperature)
    plain = generate(
        engine("target"),
        None,
        [OfflineRequest(prompt, settings, noise_key(1, 0, prompt)) for prompt in prompts],
        0,
    )
    found = []
    for start in range(0, len(prompts), company):
        found += rounds(target_with(kind), prompts[start : start + company], temperature, 5, alternatives=8)
    assert [text.tokens for text in found] == [output.tokens for output in plain]
    assert sum(output.accepted for output in found) > len(prompts)


def test_tight_cache_makes_trees_narrow_and_changes_no_text() -> None:
    block = 4 * (6 * 2 * 4 * 32 + 2 * 2 * 64) * 4
    tight = engine_with("eagle3", DRAFTERS / "eagle3", block_size=4, cache_memory=60 * block)
    found = drafted_texts(tight, 0.7, depth=4, company=6, alternatives=6)
    assert [text.tokens for text in found] == plain_texts(0.7)
    assert any(not draft.is_chain for text in found for draft in text.drafts)
    assert any(draft.is_chain and len(draft) > 1 for text in found for draft in text.drafts)


@pytest.mark.parametrize("alternatives", [0, 6])
def test_verdict_tells_which_guess_would_have_been_right(alternatives: int) -> None:
    """So the pace knows what alternatives would bring before there are any."""
    found = drafted_texts(target_with("eagle3"), 0.7, depth=4, company=6, alternatives=alternatives)
    second = refused = 0
    for kind, drafted in zip(KINDS, found, strict=True):
        text = [*prompt_of(kind), *drafted.tokens]
        for length, draft, rank in zip(drafted.lengths, drafted.drafts, drafted.ranks[1:], strict=True):
            chain = draft.tokens[: draft.chain_length]
            right = agreement(chain, text[length:]).correct
            assert (rank is None) is (right == len(chain))
            if rank is None:
                continue
            parent = ROOT if right == 0 else right - 1
            guesses = [
                token for token, above in zip(draft.tokens, draft.parents, strict=True) if above == parent
            ]
            said = text[length + right]
            assert rank == guesses.index(said) if said in guesses else rank >= len(guesses)
            refused, second = refused + 1, second + (rank == 1)
    assert 0.2 < second / refused < 0.8


@pytest.mark.parametrize("confidence", [0.1, 0.9])
def test_confidence_of_the_drafter_weighs_what_its_first_guess_promises(confidence: float) -> None:
    trees, logits = Trees([DraftRequest(text(), 1, 2)]), torch.full((1, VOCABULARY), -50.0)
    shares = torch.tensor([0.6, 0.3, 0.1])
    logits[0, 3:6] = shares.log()
    trees.grow(logits, confidences=torch.tensor([confidence]).logit())
    (promises,) = trees.promises
    odds = math.sqrt(0.6 / 0.4 * confidence / (1 - confidence))
    assert promises[0] == pytest.approx(odds / (1 + odds), abs=1e-3)
    assert sum(promises) == pytest.approx(1.0, abs=1e-3)
    assert promises[1] == pytest.approx(3 * promises[2], rel=1e-3)  # as before
