"""The corpus: every kind, and prompts that no training document starts with."""

from functools import cache

import pytest

from outrider.demo.prompts import KINDS
from workshop.demo.corpus import HELD_OUT_PROMPTS, READING, REPETITIONS, Corpus, load_corpus, shorten, split


@cache
def corpus() -> Corpus:
    return load_corpus(characters=200_000, draws=600)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_documents_start_with_no_held_out_prompt(kind: str) -> None:
    held_out = tuple(corpus().held_out[kind])
    assert len(set(held_out)) == HELD_OUT_PROMPTS
    assert corpus().training[kind]
    assert not any(text.startswith(held_out) for text in corpus().training[kind])


@pytest.mark.slow
def test_even_documents_are_there_for_what_must_be_read() -> None:
    even, held_out = corpus().even, corpus().held_out
    assert even.keys() == {*READING, REPETITIONS}
    assert all(len(texts) > 100 for texts in even.values())
    for kind in READING:
        assert not any(text.startswith(tuple(held_out[kind])) for text in even[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_corpus_size_is_bounded(kind: str) -> None:
    *others, _ = corpus().training[kind]
    assert sum(map(len, others)) < 200_000


def test_split_text_is_whole_and_its_prompt_ends_with_a_word() -> None:
    text = "several words " * 50
    document = split(text)
    assert "".join(document) == text
    assert document.prompt.endswith(("several", "words"))
    assert 100 < len(document.prompt) <= 150


def test_shorten_keeps_the_text_that_reaches_the_limit() -> None:
    assert shorten(["aaa", "bbb", "ccc"], 4) == ["aaa", "bbb"]
    assert shorten(["aaa"], 100) == ["aaa"]
