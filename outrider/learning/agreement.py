"""Comparison of guessed tokens with the text that followed."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Agreement:
    """Result of comparing one guess with the text at its positions."""

    correct: int  # leading tokens of the guess that equal the text
    reached: int  # tokens of the guess that the text judges: all correct tokens and the first wrong token


def agreement(guess: Sequence[int], text: Sequence[int]) -> Agreement:
    """Returns how far a guess equals the text that begins at the same position.

    The text judges a token only if all tokens before it are correct and the text is long enough:
    ``reached`` is ``min(correct + 1, len(guess), len(text))``.
    """
    shorter = min(len(guess), len(text))
    pairs = enumerate(zip(guess, text, strict=False))
    correct = next((place for place, (token, truth) in pairs if token != truth), shorter)
    return Agreement(correct, min(correct + 1, shorter))
