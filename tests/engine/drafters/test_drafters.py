"""Drafting: pauses, context lengths, vocabularies, trees and the distributions that Drafts carry."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from outrider.decoding.draft import Draft
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling, Verification
from outrider.demo.prompts import DEMO
from outrider.drafters.ngram import NgramIndex
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.errors import VocabularyMismatchError
from outrider.engine.loading.vocabulary import check_vocabulary
from outrider.engine.offline.index import IndexDrafter
from outrider.engine.offline.speculate import OfflineGeneration, OfflineRequest, generate
from tests.support.demo_pair import engine, prompt_of, text_of


def generation(prompt: tuple[int, ...], **settings) -> OfflineGeneration:
    sampling = Sampling(max_tokens=64, ignore_eos=True, **settings)
    return OfflineGeneration(len(prompt), noise_key(1, 0, prompt), sampling, list(prompt))


def proposed(
    drafter: Drafter, sequences: list[OfflineGeneration], depth: int, alternatives: int
) -> list[Draft]:
    return drafter.propose([DraftRequest(sequence, depth, alternatives) for sequence in sequences])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_after_a_pause_are_those_without_one(temperature: float) -> None:
    """While speculation pauses the draft falls behind; a stale cache would draft from the wrong context."""
    prompt = prompt_of("code")
    text = text_of(prompt, 40, temperature=temperature)
    steady = DraftModel(engine("draft"))
    paused = DraftModel(engine("draft"))
    always, sometimes = (generation(prompt, temperature=temperature) for _ in range(2))
    for place in range(len(text) - 4):
        expected = proposed(steady, [always], 4, 0)[0]
        if place < 5 or place >= 25:
            assert proposed(paused, [sometimes], 4, 0)[0] == expected
        always.tokens.append(text[place])
        sometimes.tokens.append(text[place])


def test_sequence_past_the_drafts_context_does_not_hurt_the_others() -> None:
    draft = engine("draft")
    short, long = prompt_of("json"), tuple(range(5, 25)) * (draft.max_length // 20 + 1)
    drafter = DraftModel(draft)
    alone = proposed(drafter, [generation(short, temperature=0.0)], 4, 0)[0]
    together = proposed(
        drafter, [generation(long, temperature=0.0), generation(short, temperature=0.0)], 4, 0
    )
    assert len(together[0]) == 0
    assert together[1] == alone
    assert len(alone) == 4


def test_tree_holds_the_chain() -> None:
    drafter = DraftModel(engine("draft"))
    for kind in ("code", "prose", "stories"):
        prompt = prompt_of(kind)
        chain = proposed(drafter, [generation(prompt, temperature=1.0)], 4, 0)[0]
        tree = proposed(drafter, [generation(prompt, temperature=1.0)], 4, 3)[0]
        node = -1
        for token in chain.tokens:
            child = tree.child(node, token)
            assert child is not None
            node = child
        assert len(tree) == len(chain) + 3


@pytest.mark.parametrize("verification", ["rejection", "block"])
@pytest.mark.parametrize("name", ["model", "ngram"])
def test_under_rejection_or_block_a_draft_carries_what_it_was_drawn_from(
    name: str, verification: str
) -> None:
    drafter = IndexDrafter(NgramIndex) if name == "ngram" else DraftModel(engine("draft"))
    asked = generation((*prompt_of("json"), *prompt_of("json")), temperature=1.0, verification=verification)
    draft = proposed(drafter, [asked], 4, 2)[0]
    assert draft.is_chain
    assert len(draft) > 0
    assert len(draft.draft_probs) == len(draft)
    for token, probs in zip(draft.tokens, draft.draft_probs, strict=True):
        assert token in probs.token_ids
        assert sum(probs.probs) == pytest.approx(1.0)


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_rejection_or_block_finish_requests_and_accept(verification: Verification) -> None:
    asked = []
    for index in range(4):
        prompt = prompt_of("question_answer", index)
        sampling = Sampling(max_tokens=24, verification=verification, ignore_eos=True)
        asked.append(OfflineRequest(prompt, sampling, noise_key(index, 0, prompt)))
    outputs = generate(engine("target"), DraftModel(engine("draft")), asked, 4)
    assert [len(output.tokens) for output in outputs] == [24] * 4
    assert sum(output.accepted for output in outputs) > 24


def test_draft_is_never_longer_than_what_remains() -> None:
    prompt = prompt_of("json")
    asked = OfflineGeneration(len(prompt), 1, Sampling(max_tokens=3, temperature=0.0), list(prompt))
    assert len(proposed(DraftModel(engine("draft")), [asked], 8, 0)[0]) <= 2


def test_another_vocabulary_is_refused_naming_both(tmp_path: Path) -> None:
    target, draft = DEMO / "target", tmp_path / "draft"
    draft.mkdir()
    text = (target / "tokenizer.json").read_text()
    (draft / "tokenizer.json").write_text(text)
    (draft / "config.json").write_text((target / "config.json").read_text())
    (draft / "tokenizer_config.json").write_text((target / "tokenizer_config.json").read_text())
    check_vocabulary(str(target), str(draft))
    tokenizer = Tokenizer.from_str(text)
    tokenizer.add_tokens(["another"])
    tokenizer.save(str(draft / "tokenizer.json"))
    with pytest.raises(VocabularyMismatchError, match="'another'") as caught:
        check_vocabulary(str(target), str(draft))
    assert str(target) in str(caught.value)
    assert str(draft) in str(caught.value)
