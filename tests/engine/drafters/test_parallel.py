"""Drafts of a model that guesses several tokens in one pass: which, from what cache, in how many steps."""

import json
import random
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.draft import Draft
from outrider.decoding.gumbel_max import gumbel_max
from outrider.decoding.sampling import process
from outrider.decoding.settings import Sampling, Verification
from outrider.demo.prompts import DEMO
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loading.special_tokens import mask_token
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.sequence import EngineSequence
from outrider.engine.settings import EngineSettings
from outrider.engine.work import PreparedTree, Propose, Proposed
from tests.support.checkpoints import write_checkpoint
from tests.support.demo_pair import engine as demo_engine
from tests.support.grammars import GRAMMARS, ids

MASK = 250
DEPTH = 4
PROMPT = tuple(random.Random(1).choices(range(5, 200), k=37))
WARM = Sampling(max_tokens=64, ignore_eos=True, temperature=4.0)  # so warm that guesses are often right
GREEDY = Sampling(max_tokens=64, ignore_eos=True, temperature=0.0)


@cache
def _folders() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


@cache
def checkpoint(kind: str = "llama") -> Path:
    return write_checkpoint(Path(_folders().name) / kind, kind, pard_token=MASK)


@cache
def engine(branches: int, kind: str = "llama") -> Engine:
    return Engine.from_settings(
        EngineSettings(
            model=str(checkpoint(kind)), block_size=8, cache_memory=2**24, threads=1, draft_ahead=branches
        )
    )


def by_the_book(
    tokens: tuple[int, ...], sampling: Sampling, depth: int, alternatives: int = 1
) -> list[list[int]]:
    """Returns the best guesses, [depth, alternatives]: one pass of transformers over tokens and masks."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint(), attn_implementation="eager").eval()
    masks = [MASK] * (depth - 1)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*tokens, *masks]])).logits[0, -depth:]
    rows = [
        ChoiceContext(sampling, 7, len(tokens) + place, PROMPT, tokens[len(PROMPT) :], (MASK,) * place)
        for place in range(depth)
    ]
    return gumbel_max(process(logits, rows), rows, alternatives)[0].tolist()


def opened(engine: Engine, sampling: Sampling = WARM) -> EngineSequence:
    return engine.open(len(PROMPT), 7, sampling)


def drafted(
    engine: Engine,
    sequence: EngineSequence,
    base: int,
    tokens: tuple[int, ...],
    depth: int = DEPTH,
    alternatives: int = 0,
) -> Proposed:
    """Until the Draft is there; nothing is prepared."""
    engine.submit(Propose(sequence.number, base, tokens, depth, base, alternatives))
    while True:
        for result in engine.step():
            if isinstance(result, Proposed):
                return result


def run(engine: Engine) -> list:
    results = []
    while engine.has_work:
        results += engine.step()
    return results


@pytest.mark.parametrize(
    "sampling", [GREEDY, WARM, WARM.model_copy(update={"top_k": 5})], ids=["0", "4", "5"]
)
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_draft_is_what_one_pass_over_tokens_and_masks_says(sampling: Sampling, depth: int) -> None:
    draft, sequence, text = engine(0), opened(engine(0), sampling), PROMPT
    base: int = 0
    for more in ((), (9, 8, 7), (6,)):
        proposed = drafted(draft, sequence, base, (*text, *more)[base:], depth)
        text = (*text, *more)
        base = len(text)
        assert proposed.draft == Draft.chain([best for (best,) in by_the_book(text, sampling, depth)])
        assert proposed.timings.steps == 1
        assert (sequence.cached, sequence.pending) == (len(text), Draft())
    draft.close(sequence)


def test_alternatives_are_the_second_guesses_of_the_pass() -> None:
    draft, sequence = engine(0), opened(engine(0))
    tree = drafted(draft, sequence, 0, PROMPT, DEPTH, alternatives=3).draft
    ranked = by_the_book(PROMPT, WARM, DEPTH, alternatives=6)
    assert list(tree.tokens[:DEPTH]) == [best for best, *_ in ranked]
    assert len(tree) == DEPTH + 3
    for parent, token in zip(tree.parents[DEPTH:], tree.tokens[DEPTH:], strict=True):
        assert token in ranked[parent + 1][1:]
    draft.close(sequence)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("branches", [1, 6, 20])
def test_however_verdicts_fall_drafts_are_those_of_a_fresh_sequence(branches: int) -> None:
    """Also where they were prepared: what masks left in the cache is never read."""
    rng = random.Random(branches)
    ahead, plain = engine(branches), engine(0)
    foreseen = 0
    for _ in range(4):
        sequence, tokens = opened(ahead), PROMPT
        text: tuple[int, ...] = ()
        while len(text) < len(PROMPT) + 40:
            proposed = drafted(ahead, sequence, len(text), tokens)
            text += tokens
            fresh = opened(plain)
            assert drafted(plain, fresh, 0, text).draft == proposed.draft
            plain.close(fresh)
            foreseen += bool(proposed.ahead and proposed.ahead.tokens)
            prepared = run(ahead) if rng.random() < 0.8 else []
            tokens = fallen(rng, proposed.draft, prepared)
        ahead.close(sequence)
    assert foreseen > 8


def fallen(rng: random.Random, draft: Draft, prepared: list) -> tuple[int, ...]:
    """A Verdict's tokens: mostly one that was prepared for."""
    if prepared and rng.random() < 0.8:
        tree = prepared[0].draft
        ends = [node for node in range(len(draft), len(tree)) if tree.parents[node] < len(draft)]
        return tuple(tree.tokens[node] for node in tree.path(rng.choice(ends)))
    return (*draft.tokens[: rng.randrange(len(draft) + 1)], rng.randrange(5, 200))


def test_all_branches_are_prepared_in_one_step() -> None:
    """Each answers a Propose without another step, with as many tokens as were asked for."""
    draft = engine(12)
    sequence = opened(draft)
    proposed = drafted(draft, sequence, 0, PROMPT)
    (prepared,) = draft.step()
    assert isinstance(prepared, PreparedTree)
    assert not draft.has_work
    tree = prepared.draft
    assert tree.tokens[:DEPTH] == proposed.draft.tokens
    ends = [node for node in range(DEPTH, len(tree)) if tree.parents[node] < DEPTH]
    assert len(ends) == 12
    end = max(ends, key=lambda node: tree.depths[node])
    verdict = tuple(tree.tokens[node] for node in tree.path(end))
    assert len(verdict) == DEPTH + 1  # the whole Draft, and a guess for what comes after it
    draft.submit(Propose(sequence.number, len(PROMPT), verdict, DEPTH, 1))
    (again,) = draft.step()
    assert isinstance(again, Proposed)
    assert again.draft == tree.after(verdict)
    assert len(again.draft) == DEPTH
    assert again.timings.steps == 0
    assert again.ahead is not None
    assert (again.ahead.tokens, again.ahead.rank) == (DEPTH, 0)
    assert 0.0 < again.ahead.saved < 10.0
    assert draft.has_work  # the one after that is prepared too
    draft.close(sequence)
    assert not draft.has_work


def test_cache_that_was_lost_meanwhile_is_computed_again() -> None:
    draft = engine(12)
    sequence = opened(draft)
    before = drafted(draft, sequence, 0, PROMPT).draft
    draft._cache.release(sequence)
    assert not [result for result in run(draft) if isinstance(result, PreparedTree)]
    assert drafted(draft, sequence, len(PROMPT), ()).draft == before
    draft.close(sequence)


def test_nothing_is_guessed_beyond_the_end_of_the_generation() -> None:
    draft = engine(12)
    sequence = draft.open(len(PROMPT), 7, Sampling(max_tokens=DEPTH, ignore_eos=True, temperature=4.0))
    assert len(drafted(draft, sequence, 0, PROMPT, 8).draft) == DEPTH - 1
    prepared = run(draft)
    assert all(max(result.draft.depths) < DEPTH for result in prepared)
    draft.close(sequence)


def test_chain_ends_with_a_token_that_ends_the_generation() -> None:
    (best, *_), *rest = by_the_book(PROMPT, GREEDY, 2)
    sampling = GREEDY.model_copy(update={"stop_token_ids": (rest[0][0],)})
    draft = engine(12)
    sequence = opened(draft, sampling)
    proposed = drafted(draft, sequence, 0, PROMPT, 5)
    assert proposed.draft.tokens == (best, rest[0][0])
    run(draft)
    draft.close(sequence)


@pytest.mark.parametrize("branches", [0, 12])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_same_seed_same_text(branches: int, kind: str) -> None:
    """The target is the same model; of twelve requests some are drafted well, some badly."""
    requests = [
        OfflineRequest(
            PROMPT[: 20 + number], Sampling(max_tokens=24, ignore_eos=True, temperature=heat), number
        )
        for number in range(12)
        for heat in ((0.0, 1.0, 4.0)[number % 3],)
    ]
    plain = generate(engine(0, kind), None, requests, 0)
    drafted = generate(engine(0, kind), DraftModel(engine(branches, kind)), requests, DEPTH, alternatives=2)
    assert [output.tokens for output in drafted] == [output.tokens for output in plain]
    assert sum(output.accepted for output in drafted) > sum(len(output.tokens) for output in drafted) / 3


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_under_rejection_or_block_each_token_carries_what_it_was_drawn_from(rule: Verification) -> None:
    draft, sampling = engine(0), WARM.model_copy(update={"verification": rule})
    sequence = opened(draft, sampling)
    proposed = drafted(draft, sequence, 0, PROMPT)
    assert proposed.timings.steps == 1
    assert len(proposed.draft) == len(proposed.draft.draft_probs) == DEPTH
    for token, probs in zip(proposed.draft.tokens, proposed.draft.draft_probs, strict=True):
        probs.check(token, 256)
    draft.close(sequence)
    requests = [OfflineRequest(PROMPT, sampling.model_copy(update={"seed": seed}), seed) for seed in range(4)]
    outputs = generate(engine(0), DraftModel(engine(12)), requests, DEPTH)
    assert [len(output.tokens) for output in outputs] == [64] * 4
    assert sum(output.accepted for output in outputs) > 64


@pytest.mark.parametrize("token", [-1, 256, "x"])
def test_mask_that_the_vocabulary_does_not_have_is_refused(token: object) -> None:
    config = AutoConfig.for_model("llama", vocab_size=256, pard_token=token)
    with pytest.raises(UnsupportedModelError, match=r"pard_token=.* must be 0 to 255"):
        mask_token(config)


def test_other_models_have_none() -> None:
    assert mask_token(AutoConfig.for_model("llama", vocab_size=256)) is None


def test_under_a_grammar_the_text_is_the_same_too(tmp_path: Path) -> None:
    """A mask is no text that a grammar could follow: what comes after it is guessed without."""
    folder = tmp_path / "draft"
    shutil.copytree(DEMO / "draft", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": 7}))
    settings = EngineSettings(
        model=str(folder), cache_memory=2**24, threads=1, draft_ahead=12, self_check=False
    )
    prompt = tuple(ids("Somebody as JSON: "))
    requests = [
        OfflineRequest(prompt, Sampling(max_tokens=32, temperature=heat, grammar=GRAMMARS[name]), seed)
        for seed, (name, heat) in enumerate([("person", 0.0), ("person", 1.0), ("recursive", 1.2)])
    ]
    target = demo_engine("target")
    plain = [generate(target, None, [request], 0)[0].tokens for request in requests]
    drafted = generate(target, DraftModel(Engine.from_settings(settings)), requests, DEPTH, alternatives=2)
    assert [output.tokens for output in drafted] == plain
    assert sum(output.accepted for output in drafted) > 0
