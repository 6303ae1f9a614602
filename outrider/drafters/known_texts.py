"""Texts beside its own that the indices of a sequence guess from. Torch-free."""

from msgspec import Struct


class KnownTexts(Struct, frozen=True):
    """Token ids that a caller predicts, or that the caller was told before."""

    prediction: tuple[int, ...] = ()  # what the answer probably says
    past: tuple[int, ...] = ()  # past answers, the newest last, each with an END after it


NO_TEXTS = KnownTexts()
