"""Text to token ids without holding up what else the event loop has to do."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from gateway.generation.tokenization import LONG_LIST, LONG_TEXT, Tokenization
from tests.fakes.tokenizers import byte_tokenizer, word_tokenizer

KINDS = {"bytes": byte_tokenizer(), "words": word_tokenizer()}
TOKENIZATIONS = {name: Tokenization(tokenizer) for name, tokenizer in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
@given(st.text(max_size=30))
def test_least_tokens_is_never_more_than_the_text_has(kind, text):
    assert TOKENIZATIONS[kind].least_tokens(text) <= len(
        KINDS[kind].encode(text, add_special_tokens=False).ids
    )


@pytest.mark.parametrize("kind", KINDS)
def test_least_tokens_of_a_long_text_are_many(kind):
    assert TOKENIZATIONS[kind].least_tokens("x" * 100_000) > 5_000


def swallowing():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def dropping():
    tokenizer = byte_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), tokenizer.pre_tokenizer])
    return tokenizer


def stripping():
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.Strip()
    return tokenizer


@pytest.mark.parametrize("make", [swallowing, dropping, stripping])
def test_least_tokens_of_a_tokenizer_that_leaves_text_out_are_0(make):
    text = " " * 1000 + "<mask>"
    assert len(make().encode(text).ids) < 20
    assert Tokenization(make()).least_tokens(text) == 0


def test_least_tokens_allow_for_composed_characters():
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    text = "\u1100\u1161\u11a8" * 100
    assert Tokenization(tokenizer).least_tokens(text) <= len(tokenizer.encode(text).ids) == 300


@pytest.mark.parametrize("length", [10, 4 * LONG_TEXT])
async def test_encode_equals_the_tokenizer(length):
    text = ("the cat sät, " * length)[:length]
    for kind, tokenizer in KINDS.items():
        encoding = await TOKENIZATIONS[kind].encode(text, add_special_tokens=True)
        assert encoding.ids == tokenizer.encode(text).ids
        assert await TOKENIZATIONS[kind].decode(encoding.ids) == tokenizer.decode(encoding.ids)


async def standstill(work):
    """Longest time for which the event loop ran no other task, and time of the work, in seconds."""
    task, longest, began = asyncio.create_task(work), 0.0, time.perf_counter()
    last = began
    while not task.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    await task
    return longest, now - began


@pytest.mark.parametrize("work", ["encode", "decode"])
async def test_encode_of_a_long_text_lets_other_tasks_run(work):
    tokenization = TOKENIZATIONS["bytes"]
    text = "The cat sat on the mat. " * 20_000
    jobs = {
        "encode": lambda: tokenization.encode(text, add_special_tokens=True),
        "decode": lambda: tokenization.decode([65] * 20 * LONG_LIST),
    }
    longest, took = await standstill(jobs[work]())
    assert longest < took / 2
