"""Tokenizers made on the spot, of the two kinds that decoder-only models use."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE without merges: token id i is the i-th byte, 256 ends the sequence."""
    tokenizer = Tokenizer(models.BPE(vocab={_byte(i): i for i in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def word_tokenizer() -> Tokenizer:
    """SentencePiece style: words with a leading mark, single bytes for whatever has no token of its own."""
    words = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁the", "▁cat", "▁sat", "s", ",", "é"]
    merges: list[tuple[str, str]] = []
    for word in ("▁the", "▁cat", "▁sat"):
        for end in range(2, len(word) + 1):
            merges.append((word[: end - 1], word[end - 1]))
            words += [part for part in (word[: end - 1], word[end - 1], word[:end]) if part not in words]
    vocab = {word: i for i, word in enumerate(words)}
    model = models.BPE(vocab=vocab, merges=list(dict.fromkeys(merges)), unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def _byte(value: int) -> str:
    """The character that stands for a byte in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if value in printable:
        return chr(value)
    return chr(256 + [byte for byte in range(256) if byte not in printable].index(value))
