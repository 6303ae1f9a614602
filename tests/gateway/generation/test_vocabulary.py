"""The bytes of tokens, joined, are those of the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generation.vocabulary import TokenBytes
from tests.fakes.tokenizers import byte_tokenizer, word_tokenizer

BYTES, WORDS = byte_tokenizer(), word_tokenizer()
texts = st.text(alphabet="the cats,é€😀\u0301\n", max_size=30)


@given(texts)
def test_token_bytes_of_a_byte_level_vocabulary_are_the_text(text):
    ids = BYTES.encode(text).ids
    assert b"".join(map(TokenBytes(BYTES).of, ids)) == text.encode()


@given(st.lists(st.integers(0, 255)))
def test_token_bytes_of_a_byte_level_vocabulary_are_exact_without_text(values):
    assert b"".join(map(TokenBytes(BYTES).of, values)) == bytes(values)


@given(texts)
def test_token_bytes_of_a_single_byte_vocabulary_are_the_text_after_its_space(text):
    ids = WORDS.encode(text).ids
    assert b"".join(map(TokenBytes(WORDS).of, ids)) == (f" {text}" if text else "").encode()


@pytest.mark.parametrize(
    ("tokenizer", "token", "text"),
    [
        (BYTES, "a", "a"),
        (BYTES, "Ġ", " "),
        (BYTES, "Ã", "bytes:\\xc3"),
        (BYTES, "<|end|>", "<|end|>"),
        (WORDS, "▁the", " the"),
        (WORDS, "é", "é"),
        (WORDS, "<0x41>", "A"),
        (WORDS, "<0xC3>", "bytes:\\xc3"),
        (WORDS, "</s>", "</s>"),
    ],
)
def test_token_is_shown_as_text_or_as_the_numbers_of_its_bytes(tokenizer, token, text):
    assert TokenBytes(tokenizer).text(tokenizer.token_to_id(token)) == text
