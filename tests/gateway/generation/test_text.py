"""Text comes out whole, whatever the tokens cut through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from gateway.generation.text import REPLACEMENT, AnswerText, Detokenizer, StopStrings
from gateway.generation.vocabulary import Vocabulary, load_tokenizer
from tests.fakes.tokenizers import byte_tokenizer, word_tokenizer

BYTES, WORDS = byte_tokenizer(), word_tokenizer()
END = BYTES.token_to_id("<|end|>")

texts = st.text(alphabet="the cats,é€😀\u0301\ufffd\n", max_size=30)


def pieces_of(tokenizer, ids):
    detokenizer = Detokenizer(Vocabulary(tokenizer))
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.end()]


@given(texts)
@pytest.mark.parametrize("tokenizer", [BYTES, WORDS], ids=["bytes", "words"])
def test_pieces_joined_are_the_whole_text(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@given(st.lists(st.integers(0, END), max_size=40))
def test_pieces_joined_are_the_whole_text_for_any_bytes(ids):
    assert "".join(pieces_of(BYTES, ids)) == BYTES.decode(ids)


BYTE_TOKENS = [
    WORDS.token_to_id(f"<0x{byte:02X}>") for byte in (0x41, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0xFF)
]
WORD_TOKENS = [WORDS.token_to_id(word) for word in ("</s>", "▁", "▁the", "▁cat", "s", "é", "<unk>")]


@given(st.lists(st.sampled_from([*BYTE_TOKENS, *WORD_TOKENS]), max_size=40))
def test_pieces_joined_are_the_whole_text_for_any_run_of_single_bytes(ids):
    pieces = pieces_of(WORDS, ids)
    assert "".join(pieces) == WORDS.decode(ids)
    assert len(pieces) == len(ids) + 1


@given(st.text(alphabet="the cats€😀", max_size=20))
def test_answer_text_pieces_break_no_character_spelled_in_single_bytes(text):
    assert all(REPLACEMENT not in piece for piece in pieces_of(WORDS, WORDS.encode(text).ids))


@given(st.text(alphabet="a€😀", max_size=20))
def test_answer_text_pieces_break_no_character(text):
    assert all(REPLACEMENT not in piece for piece in pieces_of(BYTES, BYTES.encode(text).ids))


@given(st.lists(st.integers(0, END) | st.sampled_from(list("é€😀".encode())), max_size=40))
def test_answer_text_holds_back_one_incomplete_character_at_most(ids):
    detokenizer, said = Detokenizer(Vocabulary(BYTES)), ""
    for count, token_id in enumerate(ids, start=1):
        said += detokenizer.add(token_id)
        assert said == BYTES.decode(ids[:count]).removesuffix(REPLACEMENT)


@given(st.lists(st.integers(0, WORDS.get_vocab_size() - 1), max_size=40))
def test_pieces_joined_are_the_whole_text_for_any_words_and_bytes(ids):
    assert "".join(pieces_of(WORDS, ids)) == WORDS.decode(ids)


def test_tokens_that_nothing_decodes_are_joined():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert "".join(pieces_of(tokenizer, [0, 1, 1])) == tokenizer.decode([0, 1, 1]) == "a b b"


def test_character_of_four_tokens_comes_with_the_last_token():
    assert pieces_of(BYTES, BYTES.encode("😀").ids) == ["", "", "", "😀", ""]


def test_incomplete_character_comes_out_at_the_end():
    assert pieces_of(BYTES, [ord("a"), 0xF0, 0x9F]) == ["a", "", "", REPLACEMENT]


@pytest.mark.parametrize(("before", "text"), [("the", " cat sat"), ("", "cat sat")])
def test_text_that_goes_on_keeps_the_space_before_its_first_word(before, text):
    detokenizer = Detokenizer(Vocabulary(WORDS), WORDS.encode(before).ids if before else ())
    assert "".join([*map(detokenizer.add, WORDS.encode("cat sat").ids), detokenizer.end()]) == text


@given(texts, texts)
@pytest.mark.parametrize("tokenizer", [BYTES, WORDS], ids=["bytes", "words"])
def test_text_that_goes_on_is_the_rest_of_the_whole_text(tokenizer, first, second):
    before, ids = tokenizer.encode(first + "s").ids, tokenizer.encode(second).ids
    detokenizer = Detokenizer(Vocabulary(tokenizer), before)
    pieces = [*map(detokenizer.add, ids), detokenizer.end()]
    assert tokenizer.decode(before) + "".join(pieces) == tokenizer.decode([*before, *ids])


def test_space_before_a_word_survives_a_special_token():
    ids = [*WORDS.encode("the").ids, WORDS.token_to_id("</s>"), *WORDS.encode("cat").ids]
    assert "".join(pieces_of(WORDS, ids)) == "the cat"


def until_first_stop(text, stops):
    """What is asked for: characters come one at a time, so the stop that ends first wins."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@given(
    st.text(alphabet="ab", max_size=20), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)
)
def test_text_ends_before_the_first_stop_string(text, stops):
    finder, out = StopStrings(stops), ""
    for character in text:
        out += finder.add(character)
        if finder.found:
            break
    out += finder.end()
    assert out == until_first_stop(text, stops)
    assert finder.found in stops if any(stop in text for stop in stops) else finder.found is None
    assert out + (finder.found or "") == text[: len(out) + len(finder.found or "")]


@pytest.mark.parametrize("pieces", [["a stop", " and more"], ["a s", "to", "p and more"], [*"a stop and"]])
def test_stop_string_that_is_kept_ends_the_text(pieces):
    finder, out = StopStrings(["stop", "and"], keeps=True), ""
    for piece in pieces:
        out += finder.add(piece)
        if finder.found:
            break
    assert (out, finder.found) == ("a stop", "stop")


def test_text_is_held_back_only_while_it_may_be_a_stop_string():
    finder = StopStrings(["END"])
    assert [finder.add(piece) for piece in ("x", "E", "N", "x", "EN")] == ["x", "", "", "ENx", ""]
    assert finder.end() == "EN"


@given(
    st.text(alphabet="ab€", max_size=20),
    st.lists(st.integers(1, 5), min_size=60),
    st.sampled_from(["ba", "€a", ""]),
)
def test_answer_and_count_do_not_depend_on_how_many_tokens_come_at_a_time(text, sizes, stop):
    ids = BYTES.encode(text).ids
    stops = [stop] if stop else []

    def answer(sizes):
        out, kept, rest = AnswerText(Vocabulary(BYTES), stops), 0, list(ids)
        pieces = []
        while rest and out.stop is None:
            size = next(sizes)
            added = out.add(rest[:size], ends=len(rest) <= size)
            kept, rest = kept + len(added), rest[size:]
            pieces += added
        return kept, "".join(piece.text for piece in pieces), [piece.start for piece in pieces], out.stop

    assert answer(iter(sizes)) == answer(iter([1] * 100))


def test_text_begins_after_single_bytes_that_were_held_back():
    ids = WORDS.encode("é😀 the").ids
    pieces = AnswerText(Vocabulary(WORDS), []).add(ids, ends=True)
    assert pieces[-1].text.endswith("😀 the")
    assert "".join(piece.text for piece in pieces)[pieces[-1].start :] == " the"


def test_tokenizer_that_would_cut_or_fill_prompts_does_neither(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(str(tmp_path)).encode("x" * 6).ids) == 6


def test_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path}.*holds no tokenizer.json"):
        load_tokenizer(str(tmp_path))


def test_tokens_without_text_are_not_kept():
    """A model may say one again and again."""
    end, words = WORDS.token_to_id("</s>"), WORDS.encode("the cat").ids
    detokenizer = Detokenizer(Vocabulary(WORDS))
    text = "".join(detokenizer.add(token_id) for token_id in [*words[:1], *[end] * 1000, *words[1:]])
    assert text + detokenizer.end() == WORDS.decode(words)
    assert len(detokenizer._new) + len(detokenizer._context) <= len(words)


@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [(0, "x"), (1, "x"), (2, "x"), (3, "xab"), (4, "xab"), (5, "xabab."), (6, "xabab.")],
)
def test_stop_string_complete_within_min_tokens_does_not_end_the_answer(min_tokens, expected):
    text = AnswerText(Vocabulary(BYTES), ["ab"], min_tokens=min_tokens)
    pieces = text.add(BYTES.encode("xabab.").ids, ends=True)
    assert "".join(piece.text for piece in pieces) == expected
    assert (text.stop is not None) == (expected != "xabab.")
    assert len(pieces) > min_tokens or text.stop is None


def test_stop_string_passed_over_by_min_tokens_is_not_found_in_held_text():
    """The end of "xab" is held back for "abc"."""
    text = AnswerText(Vocabulary(BYTES), ["ab", "abc"], min_tokens=3)
    pieces = text.add(BYTES.encode("xabd").ids, ends=True)
    assert "".join(piece.text for piece in pieces) == "xabd"
