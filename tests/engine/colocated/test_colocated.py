"""A draft model in the target's process: equal texts, a draft worker's Drafts, bounded work, its memory."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from outrider.decoding.draft import Draft
from outrider.decoding.lease import Lease
from outrider.decoding.outcomes import RANKS
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.colocated.colocated import Colocated
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.errors import UnsupportedModelError, VocabularyMismatchError
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineGeneration
from outrider.engine.planning.memory_plan import plan_memory
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.settings import EngineSettings, TargetDrafterSettings
from outrider.engine.work import Decode, Decoded, Result, plain_decoding
from tests.support.allocated import allocated_cache
from tests.support.demo_pair import engine, prompt_of
from tests.support.target_drafters import (
    KINDS,
    TOKENS,
    Drafted,
    drafted_texts,
    drafter_of,
    engine_with,
    plain_texts,
    rounds,
)

DEPTH = 4
LENGTH = 2  # tokens of a text whose distribution is compared


@pytest.fixture(scope="module")
def target() -> Engine:
    return engine_with("colocated", DEMO / "draft")


def draft_engine(target: Engine) -> Engine:
    """Returns the engine of the model in the target's process."""
    drafter = drafter_of(target)
    assert isinstance(drafter, Colocated)
    assert drafter._model is not None
    return drafter._model._draft


def steps_of(draft: Engine, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Returns a list that grows by an item for each step of the draft model."""
    steps: list[None] = []
    step = draft.step

    def counted() -> list[Result]:
        steps.append(None)
        return step()

    monkeypatch.setattr(draft, "step", counted)
    return steps


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.2])
@pytest.mark.parametrize(("company", "alternatives"), [(1, 0), (3, 4)])
def test_colocated_with_drafts_gives_the_text_of_plain_decoding(
    target: Engine, temperature: float, company: int, alternatives: int
) -> None:
    found = drafted_texts(target, temperature, DEPTH, company, alternatives)
    assert [output.tokens for output in found] == plain_texts(temperature)
    assert sum(output.accepted for output in found) > TOKENS


def test_colocated_drafts_are_those_of_a_draft_worker(target: Engine) -> None:
    """A draft worker runs the same engine; both follow the text, so their Drafts agree round by round."""
    prompt, worker = prompt_of("stories"), DraftModel(engine("draft"))
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, temperature=0.7)
    (found,) = rounds(target, [prompt], 0.7, DEPTH, 2)
    text = OfflineGeneration(len(prompt), noise_key(1, 0, prompt), sampling, [*prompt])
    for draft, length in zip(found.drafts, found.lengths, strict=True):
        text.tokens = [*prompt, *found.tokens][:length]
        (expected,) = worker.propose([DraftRequest(text, min(DEPTH, len(prompt) + TOKENS - 1 - length), 2)])
        assert draft.tokens[: draft.chain_length] == expected.tokens[: expected.chain_length]


def test_colocated_chain_without_alternatives_tells_the_place_of_the_targets_token(target: Engine) -> None:
    """The pace learns from it what alternatives would bring before a Draft has any."""
    found = drafted_texts(target, 0.7, DEPTH, 3)
    places = [rank for text in found for rank in text.ranks if rank is not None]
    refused = sum(text.accepted < sum(map(len, text.drafts)) for text in found)
    assert len(places) >= refused > 0
    assert {*places} <= {*range(1, RANKS + 1)}
    assert places.count(1) > len(places) // 4


def test_colocated_under_plain_decoding_does_nothing(target: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, prompt = steps_of(draft_engine(target), monkeypatch), prompt_of("code")
    sequence = target.open(len(prompt), 7, Sampling(max_tokens=TOKENS, ignore_eos=True))
    target.submit(plain_decoding(sequence.number, 0, prompt, TOKENS))
    while target.has_work:
        target.step()
    target.close(sequence)
    assert steps == []


def test_colocated_after_plain_decoding_catches_up_and_drafts_again(target: Engine) -> None:
    (found,) = rounds(target, [prompt_of("json")], 0.0, DEPTH, plain=(6, 20))
    assert (found.tokens,) == (plain_texts(0.0)[KINDS.index("json")],)
    assert found.drafts[-2]


def test_colocated_with_a_long_prompt_takes_bounded_steps_until_it_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model takes 4 steps of at most 16 tokens for each Draft, so no step of the target waits long."""
    target = engine_with("colocated", DEMO / "draft", prefill_chunk=16)
    prompt = (prompt_of("code") * 20)[:200]
    steps, drafts, taken = steps_of(draft_engine(target), monkeypatch), [], []
    sequence = target.open(len(prompt), 7, Sampling(max_tokens=TOKENS, ignore_eos=True))
    target.submit(Decode(sequence.number, 0, prompt, Draft(), 1, Lease(depth=DEPTH, drafter="colocated")))
    for number in range(2, 8):
        while not (results := [result for result in target.step() if isinstance(result, Decoded)]):
            pass
        drafts.append(results[0].draft)
        taken.append(len(steps))
        steps.clear()
        length = len(sequence.tokens)
        following = results[0].draft or Draft()
        target.submit(
            Decode(sequence.number, length, (), following, number, Lease(depth=DEPTH, drafter="colocated"))
        )
    assert max(taken) == DEPTH
    assert not drafts[0]
    assert not drafts[1]
    assert drafts[-1]


def test_colocated_beyond_the_context_of_its_model_drafts_nothing(target: Engine) -> None:
    draft = draft_engine(target)
    short, long = prompt_of("json"), tuple(range(5, 25)) * (draft.max_length // 20 + 1)
    sampling = Sampling(max_tokens=8, temperature=0.0)
    texts = [OfflineGeneration(len(prompt), 1, sampling, [*prompt]) for prompt in (long, short)]
    drafts = DraftModel(draft).propose_within(1000, [DraftRequest(text, DEPTH) for text in texts])
    assert [len(draft) for draft in drafts] == [0, DEPTH]


def test_colocated_of_a_closed_sequence_holds_no_cache(target: Engine) -> None:
    pool = draft_engine(target)._cache.pool
    before = pool.available
    rounds(target, [prompt_of("prose")], 0.7, DEPTH)
    assert pool.available == before


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_colocated_under_other_rules_sends_the_distributions_of_its_tokens(target: Engine, rule: str) -> None:
    (found,) = rounds(target, [prompt_of("code")], 1.0, DEPTH, verification=rule)
    assert any(found.drafts)
    assert all(len(draft.draft_probs) == len(draft) for draft in found.drafts)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", pytest.param("block", marks=pytest.mark.slow)])
def test_colocated_under_other_rules_gives_the_distribution_of_the_target(target: Engine, rule: str) -> None:
    """1,280 texts against the model's probabilities: their second token is drafted and judged."""
    prompt, temperature, kept, company = prompt_of("prose"), 2.0, 3, 64
    counts, accepted = Counter[tuple[int, ...]](), 0
    for seed in range(1, 1281, company):
        prompts, last = [prompt] * company, LENGTH + 2
        found = rounds(
            target, prompts, temperature, DEPTH, seed=seed, verification=rule, max_tokens=last, top_k=kept
        )
        counts.update(drafted.tokens[:LENGTH] for drafted in found)
        accepted += sum(drafted.accepted for drafted in found)
    probs = probabilities(prompt, temperature, kept)
    assert accepted > 500
    assert counts.keys() == probs.keys()
    expected = [counts.total() * probability for probability in probs.values()]
    assert chisquare([*map(counts.__getitem__, probs)], expected, sum_check=False).pvalue > 1e-4


def probabilities(prompt: tuple[int, ...], temperature: float, kept: int) -> dict[tuple[int, ...], float]:
    """Returns probabilities of texts of LENGTH tokens, each among the likeliest ``kept`` of its position."""
    model = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32)
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *text] for text in texts])).logits[:, -1]
        values, tokens = logits.topk(kept)
        texts = {
            (*text, token): before * share
            for (text, before), row, shares in zip(
                texts.items(), tokens.tolist(), (values / temperature).softmax(-1).tolist(), strict=True
            )
            for token, share in zip(row, shares, strict=True)
        }
    return texts


def test_colocated_whose_engine_fails_costs_drafts_alone(
    target: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing() -> list[Result]:
        raise RuntimeError("lost")

    with monkeypatch.context() as broken:
        broken.setattr(draft_engine(target), "step", failing)
        (found,) = rounds(target, [prompt_of("json")], 0.0, DEPTH)
        assert (found.tokens, found.rounds) == (plain_texts(0.0)[KINDS.index("json")], 0)
    (found,) = rounds(target, [prompt_of("json")], 0.0, DEPTH)
    assert found.rounds > 0


def test_colocated_cache_holds_the_targets_tokens_in_the_planned_bytes(target: Engine) -> None:
    caches = target._cache, draft_engine(target)._cache
    planned = plan_memory(skeleton(target.settings), target.settings, 2**34)
    assert [cache.pool.num_blocks for cache in caches] == [planned.num_blocks] * 2
    assert planned.cache == sum(map(allocated_cache, caches))


@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_colocated_with_quantized_weights_drafts_the_same_text(quantization: str) -> None:
    target = engine_with("colocated", DEMO / "draft", {"quantization": quantization})
    found = drafted_texts(target, 0.7, DEPTH, 3)
    assert draft_engine(target).settings.quantization == quantization
    assert [output.tokens for output in found] == plain_texts(0.7)
    assert sum(output.accepted for output in found) > TOKENS


@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_colocated_beside_a_quantized_target_keeps_its_own_type(quantization: str) -> None:
    quantized: dict[str, Any] = {"quantization": quantization}
    target = engine_with("colocated", DEMO / "draft", **quantized)
    found: list[Drafted] = drafted_texts(target, 0.0, DEPTH, 6)
    assert sum(output.accepted for output in found) > TOKENS
    assert draft_engine(target).settings.quantization is None


def test_colocated_without_a_checkpoint_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"drafters\.colocated\.checkpoint is not given"):
        engine_with("colocated")


def test_colocated_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = shutil.copytree(DEMO / "draft", tmp_path / "other")
    tokenizer = Tokenizer.from_file(str(other / "tokenizer.json"))
    tokenizer.add_tokens(["another"])
    tokenizer.save(str(other / "tokenizer.json"))
    with pytest.raises(VocabularyMismatchError, match="different vocabularies"):
        engine_with("colocated", other)


def test_plan_of_a_target_counts_the_colocated_model() -> None:
    settings = EngineSettings(model=str(DEMO / "target"), dtype="float32", cache_memory=2**26)
    beside = settings.model_copy(
        update={"drafters": {"colocated": TargetDrafterSettings(checkpoint=str(DEMO / "draft"))}}
    )
    alone, both = (plan_memory(skeleton(of), of, 2**34) for of in (settings, beside))
    of_draft = skeleton(settings.model_copy(update={"model": str(DEMO / "draft")}))
    assert both.weights - alone.weights >= of_draft.weight_bytes()
    assert both.num_blocks < alone.num_blocks


SETTINGS = [
    Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True),
    Sampling(temperature=0.8, max_tokens=TOKENS),
    Sampling(temperature=0.9, top_p=0.9, max_tokens=TOKENS, ignore_eos=True),
    Sampling(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=TOKENS),
]


def test_draft_model_chain_is_that_of_one_token_at_a_time() -> None:
    """Texts together, six positions for a Draft, are compared with each text alone and a Draft per token."""
    together, alone = DraftModel(engine("draft")), DraftModel(engine("draft"))
    prompts = [prompt_of(kind) for kind in KINDS]
    settings = [SETTINGS[place % len(SETTINGS)] for place in range(len(prompts))]
    texts = [
        OfflineGeneration(len(prompt), noise_key(7, 0, prompt), sampling, [*prompt])
        for prompt, sampling in zip(prompts, settings, strict=True)
    ]
    for accepted in (0, 3, 6):
        drafts = together.propose([DraftRequest(text, 6, round=accepted) for text in texts])
        for text, draft in zip(texts, drafts, strict=True):
            copy = OfflineGeneration(text.prompt_length, text.noise_key, text.sampling, [*text.tokens])
            for _ in draft.tokens:
                (single,) = alone.propose([DraftRequest(copy, 1)])
                copy.tokens += single.tokens
            alone.forget(copy)
            assert copy.tokens == [*text.tokens, *draft.tokens]
            assert len(draft) == 6 or draft.tokens[-1] in together._sequences[text].end_token_ids
            text.tokens += [*draft.tokens[:accepted], 17]
