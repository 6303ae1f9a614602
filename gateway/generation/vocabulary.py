"""Tokenizers and their tokens, without transformers, which would import torch."""

from collections.abc import Collection, Sequence
from pathlib import Path

from tokenizers import Tokenizer

SPACE_MARK = "▁"


def load_tokenizer(source: str) -> Tokenizer:
    """Loads a tokenizer from a local folder that holds tokenizer.json, or from a hub id.

    Raises:
        ValueError: neither exists; the message names the source.
    """
    tokenizer = _load(source)
    # A checkpoint may set truncation and padding for training, which would silently change prompts here.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _load(source: str) -> Tokenizer:
    file = Path(source) / "tokenizer.json"
    if file.is_file():
        return Tokenizer.from_file(str(file))
    if Path(source).is_dir():
        raise ValueError(f"tokenizer={source!r}: the folder holds no tokenizer.json")
    try:
        return Tokenizer.from_pretrained(source)
    except Exception as error:  # the library raises errors of many kinds
        raise ValueError(
            f"tokenizer={source!r}: neither a folder nor a hub id that can be read: {error}"
        ) from error


class Vocabulary:
    """Tokenizer, with the kinds of tokens that matter for decoding token by token."""

    def __init__(self, tokenizer: Tokenizer, shown: Collection[str] = ()) -> None:
        """shown: special tokens that are part of the text."""
        self.tokenizer = tokenizer
        special = {
            i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self.special_ids = frozenset(i for i, content in special.items() if content not in shown)
        self._shows_any = len(self.special_ids) < len(special)
        # A vocabulary with byte fallback spells unknown characters in single-byte tokens. A run of such
        # tokens is decoded as a whole: an invalid byte turns the whole run into replacement characters.
        falls_back = "ByteFallback" in decoder_of(tokenizer)
        ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)) if falls_back else ()
        self.run_ids = frozenset(id_ for id_ in ids if id_ is not None)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text without special tokens, except for the shown tokens."""
        if not self._shows_any:
            return self.tokenizer.decode(token_ids)
        ids = [token_id for token_id in token_ids if token_id not in self.special_ids]
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def decoder_of(tokenizer: Tokenizer) -> str:
    """Returns the decoder of a tokenizer as JSON; "" if tokens are only joined."""
    return tokenizer.decoder.__getstate__().decode() if tokenizer.decoder else ""


class TokenBytes:
    """Bytes of tokens, for byte-level vocabularies and SentencePiece vocabularies with byte fallback."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = "ByteLevel" in decoder_of(tokenizer)
        self._falls_back = "ByteFallback" in decoder_of(tokenizer)
        self._added = {id_: token.content for id_, token in tokenizer.get_added_tokens_decoder().items()}

    def of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id) or ""
        if self._is_byte_level:
            return b"".join(BYTE_OF.get(char, char.encode()) for char in token)
        if self._falls_back and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace(SPACE_MARK, " ").encode()

    def text(self, token_id: int) -> str:
        """Returns the token's text, or its bytes in OpenAI's notation if they are not valid UTF-8."""
        value = self.of(token_id)
        try:
            return value.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in value)


def _byte_level_alphabet() -> dict[str, bytes]:
    """Returns GPT-2's byte alphabet: printable bytes stand for themselves, other bytes follow from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): bytes([byte]) for byte in printable}
    return characters | {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}


BYTE_OF = _byte_level_alphabet()
