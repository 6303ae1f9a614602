"""The tokenizer that target and draft share: byte-level BPE with single digits and a chat format."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from workshop.demo.chat import CHAT_TEMPLATE, RESPONSE_TEMPLATE

VOCAB_SIZE = 2048
SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|pad|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
    "<|tool|>",
]
END_OF_TEXT, PAD, END = 0, 1, 5  # ids: special tokens come first
TOOL_TAGS = ["<tool_call>", "</tool_call>"]  # tokens that stay in decoded text, because clients parse them


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learns VOCAB_SIZE tokens from texts.

    Special tokens get the first ids, the tags of tool calls the last ids. Every byte has a token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(TOOL_TAGS),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TOOL_TAGS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, longest: int) -> None:
    """Writes the files that AutoTokenizer and readers of a plain tokenizer.json expect."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[END_OF_TEXT],
        "eos_token": SPECIAL_TOKENS[END_OF_TEXT],
        "pad_token": SPECIAL_TOKENS[PAD],
        "additional_special_tokens": SPECIAL_TOKENS[2:],
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
        "response_template": RESPONSE_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
