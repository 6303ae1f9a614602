"""Tokenizes prompts and decodes token ids. Threads do long work, so that the event loop is not blocked."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tokenizers import Encoding, Tokenizer

from gateway.generation.vocabulary import BYTE_OF, decoder_of

# Longer work goes to a thread: it takes about a millisecond, ten times as long as the hand-over.
LONG_TEXT = 2048  # characters
LONG_AT_ONCE = 4  # threads; tokenizing a text of 4 MB takes 440 MB of memory
LONG_LIST = 2**14  # token ids
LOSSLESS = {
    "Sequence",
    "Prepend",
    "Replace ' ' by '▁'",
    "NFC",
    "ByteLevel",
    "Split Isolated",
    "Digits",
    "Metaspace",
}
LARGEST_SHRINKAGE = 3  # factor by which NFC can reduce bytes


ResultT = TypeVar("ResultT")


class Tokenization:
    """Runs a tokenizer; long texts are processed in threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes_per_token = _bytes_per_token(tokenizer)
        self._threads = ThreadPoolExecutor(LONG_AT_ONCE, "tokenization")

    def least_tokens(self, text: str) -> int:
        """Returns a lower bound of a text's number of tokens without tokenizing it; 0 if none is known."""
        return -(-len(text.encode()) // self._bytes_per_token) if self._bytes_per_token else 0

    async def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """Returns token ids and tokens, without offsets."""

        def encode() -> Encoding:
            # In its call for a single text the library would not let other threads run.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

        return await self._in_thread(encode) if len(text) > LONG_TEXT else encode()

    async def encode_apart(self, pieces: Sequence[str], *, add_special_tokens: bool = False) -> list[int]:
        """Returns the token ids of the joined pieces; no token spans two pieces.

        add_special_tokens: whether special tokens are added around the whole.
        """

        def encode() -> list[int]:
            whole = Encoding.merge(self._tokenizer.encode_batch_fast([*pieces], add_special_tokens=False))
            ids: list[int] = self._tokenizer.post_process(whole, add_special_tokens=add_special_tokens).ids
            return ids

        return await self._in_thread(encode) if sum(map(len, pieces)) > LONG_TEXT else encode()

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids."""

        def decode() -> str:
            return self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]

        return await self._in_thread(decode) if len(token_ids) > LONG_LIST else decode()

    async def _in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _bytes_per_token(tokenizer: Tokenizer) -> int | None:
    """Returns the most bytes of text that one token can stand for; None if unknown.

    The number is known for vocabularies that can spell any text, byte by byte if necessary.
    """
    vocabulary, decoder = tokenizer.get_vocab(with_added_tokens=True), decoder_of(tokenizer)
    is_byte_level = "ByteLevel" in decoder
    alphabet = set(BYTE_OF) if is_byte_level else {f"<0x{byte:02X}>" for byte in range(256)}
    added = tokenizer.get_added_tokens_decoder().values()
    swallows = any(token.lstrip or token.rstrip for token in added)  # absorbs any number of spaces
    kinds = {*_kinds(tokenizer.normalizer), *_kinds(tokenizer.pre_tokenizer)}
    if swallows or not alphabet <= vocabulary.keys() or not kinds <= LOSSLESS:
        return None
    longest = max(len(token) if is_byte_level else len(token.encode()) for token in vocabulary)
    longest = max(longest, *(len(token.content.encode()) for token in added), 1)
    return longest * (LARGEST_SHRINKAGE if "NFC" in kinds else 1)


def _kinds(part: Any) -> Iterator[str]:
    """Yields the kinds of steps of a normalizer or pre-tokenizer, with what a step replaces or splits."""
    steps = [json.loads(part.__getstate__())] if part is not None else []
    for step in steps:
        inner = step.get("normalizers", []) + step.get("pretokenizers", [])
        steps += inner
        if step["type"] == "Replace":
            yield f"Replace {step['pattern'].get('String')!r} by {step['content']!r}"
        elif step["type"] == "Split":
            yield f"Split {step['behavior']}"
        else:
            yield step["type"]
