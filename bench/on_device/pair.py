"""Makes a target and a draft with known texts: `python -m bench on_device pair FOLDER`.

The weights are random, in the shapes of Llama 3, 8 B and 1 B, so that steps cost as much as with real
weights. After token t, the target's next token is t + 1, by far the most likely token, so that rounding
changes no text. The draft agrees, except after a fixed share of the tokens, where it chooses another token.
So the acceptance rate is known before anything runs. A word of a prompt is a number: the id of a token.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from bench.checkpoints import known_llama

ACCEPTANCE = 0.8  # share of tokens after which the draft is correct
UNKNOWN = "0"  # token of words that are not a number


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench on_device pair")
    parser.add_argument("folder", type=Path, help="folder to be made")
    parser.add_argument("--device", default="cuda", help="device that draws the weights")
    parser.add_argument("--shapes", nargs=2, default=["8B", "1B"], help="names in bench.checkpoints")
    options = parser.parse_args(arguments)
    for role, shape in zip(("target", "draft"), options.shapes, strict=True):
        started = time.monotonic()
        path = options.folder / role
        vocab_size = known_llama(shape, path, options.device, follows_of[role])
        write_tokenizer(path, vocab_size)
        taken = round(time.monotonic() - started, 1)
        print(json.dumps({"part": "pair", "checkpoint": str(path), "shape": shape, "s": taken}), flush=True)


def target_follows(vocab_size: int) -> np.ndarray:
    """Returns the target's next token after each token: int64 [vocab_size]."""
    return (np.arange(vocab_size) + 1) % vocab_size


def draft_follows(vocab_size: int) -> np.ndarray:
    """Returns the draft's next token after each token: int64 [vocab_size]."""
    follows = target_follows(vocab_size)
    wrong = np.random.default_rng(0).permutation(vocab_size)[round(ACCEPTANCE * vocab_size) :]
    follows[wrong] = follows[np.roll(wrong, 1)]
    return follows


follows_of = {"target": target_follows, "draft": draft_follows}


def prompt(number: int, length: int, vocab_size: int) -> list[int]:
    """Returns the tokens of a prompt; its number decides the first token."""
    first = number * 7919 % vocab_size  # a prime, so that prompts rarely overlap
    return [(first + place) % vocab_size for place in range(length)]


def text(after: int, tokens: int, vocab_size: int) -> list[int]:
    """Returns the tokens that the target generates after a token."""
    return [(after + 1 + place) % vocab_size for place in range(tokens)]


def accepted(after: int, depth: int, vocab_size: int) -> int:
    """Returns the number of accepted tokens of a Draft that follows a token."""
    is_correct = draft_follows(vocab_size) == target_follows(vocab_size)
    places = [(after + place) % vocab_size for place in range(depth)]
    return next((count for count, place in enumerate(places) if not is_correct[place]), depth)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes a tokenizer whose words are the token ids."""
    words = {str(token): token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
