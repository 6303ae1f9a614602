"""Texts, besides the sequence itself, from which its indices guess. Torch-free."""

from msgspec import Struct


class KnownTexts(Struct, frozen=True):
    """Token ids that a caller predicts, or that earlier answers to the caller contained."""

    prediction: tuple[int, ...] = ()  # expected tokens of the answer
    past: tuple[int, ...] = ()  # past answers, the newest last, each followed by END


NO_TEXTS = KnownTexts()
