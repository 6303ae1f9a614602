"""The shared tokenizer."""

from workshop.demo.tokenizer import (
    END,
    END_OF_TEXT,
    PAD,
    SPECIAL_TOKENS,
    TOOL_TAGS,
    VOCAB_SIZE,
    train_tokenizer,
)

TOKENIZER = train_tokenizer(
    ["def add(first, second):\n    return first + second\n", "It was 1234 days ago."] * 5
)


def test_tokenizer_returns_any_text_unchanged() -> None:
    text = "def naïve(x):\n\tif x >= 10**6:  # 日本 🙂\n        return None"
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


def test_tokenizer_has_a_token_for_each_digit() -> None:
    assert TOKENIZER.encode("1234").tokens == ["1", "2", "3", "4"]


def test_special_tokens_have_the_first_ids_and_are_read_from_text() -> None:
    assert [TOKENIZER.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert TOKENIZER.encode("<|end|><|endoftext|><|pad|>").ids == [END, END_OF_TEXT, PAD]


def test_tags_of_tool_calls_are_one_token_each() -> None:
    """The vocabulary of the real corpus ends with them; that of these few texts is smaller."""
    assert TOKENIZER.encode("<tool_call>{}</tool_call>").tokens == ["<tool_call>", "{", "}", "</tool_call>"]
    last = TOKENIZER.get_vocab_size()
    assert last <= VOCAB_SIZE
    assert [TOKENIZER.token_to_id(tag) for tag in TOOL_TAGS] == [last - 2, last - 1]
