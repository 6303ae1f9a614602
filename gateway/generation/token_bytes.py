"""Bytes of single tokens, which text cannot always show."""

from tokenizers import Tokenizer

from gateway.generation.vocabulary import decoder_of

SPACE_MARK = "▁"


class TokenBytes:
    """Bytes of tokens, for byte-level vocabularies and for SentencePiece's with single-byte tokens."""

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
        """Returns the token's text, or the numbers of its bytes in OpenAI's notation if they are no text."""
        value = self.of(token_id)
        try:
            return value.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in value)


def _byte_level_alphabet() -> dict[str, bytes]:
    """Returns GPT-2's alphabet: printable bytes are themselves, all further bytes characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): bytes([byte]) for byte in printable}
    return characters | {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}


BYTE_OF = _byte_level_alphabet()
