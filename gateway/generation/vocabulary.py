"""Tokenizers and their tokens. Never by transformers: it would bring torch."""

from collections.abc import Collection, Sequence
from pathlib import Path

from tokenizers import Tokenizer


def load_tokenizer(source: str) -> Tokenizer:
    """Loads a tokenizer from a local folder that holds tokenizer.json, or from a hub id.

    Raises:
        ValueError: neither exists; the message names the source.
    """
    tokenizer = _load(source)
    # A checkpoint may ask for what training needs, which would cut or fill prompts here silently.
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
    """A tokenizer, with the kinds of tokens that matter for decoding them singly."""

    def __init__(self, tokenizer: Tokenizer, shown: Collection[str] = ()) -> None:
        """shown: special tokens that are part of the text."""
        self.tokenizer = tokenizer
        special = {
            i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self.special_ids = frozenset(i for i, content in special.items() if content not in shown)
        self._shows_any = len(self.special_ids) < len(special)
        # Such a vocabulary spells what it has no token for in single bytes, and a run of them is decoded at
        # once: a byte that does not fit turns all of the run into replacement characters.
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
