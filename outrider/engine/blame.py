"""Classifies exceptions of a step: either a single sequence cannot go on, or the whole process cannot."""

from typing import NoReturn

import torch

from outrider.decoding.grammar import GrammarError
from outrider.engine.errors import CacheLostError, RankLostError
from outrider.engine.sequence import EngineSequence

NO_MEMORY = ("can't allocate memory", "not enough memory")  # torch's words on a CPU, in a plain RuntimeError
BROKEN = (RankLostError, CacheLostError, torch.AcceleratorError, torch.distributed.DistError)


class NotFiniteError(Exception):
    """Error: the model computed NaN or infinity for a sequence."""

    def __init__(self) -> None:
        super().__init__("its logits, or its keys and values, are not finite numbers")


class BlamedError(Exception):
    """Error whose cause came from work for a single sequence."""

    def __init__(self, sequence: EngineSequence) -> None:
        super().__init__(f"sequence {sequence.number}")
        self.sequence = sequence


def reason_of(error: BaseException) -> str:
    """Returns the reason for the client in our own words: a library's message may repeat the prompt."""
    return (
        str(error)
        if isinstance(error, NotFiniteError | GrammarError)
        else f"{type(error).__name__} in a step"
    )


def blame(sequence: EngineSequence, error: Exception) -> NoReturn:
    """Blames the sequence for an exception that is handled, unless it means a broken process.

    Raises:
        BlamedError: the sequence cannot continue.
        Exception: the given error, if the process is broken.
    """
    if says_broken(error):
        raise error
    raise BlamedError(sequence) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device's memory was too small: a smaller step may fit."""
    if isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY):
        return True
    return isinstance(error, torch.OutOfMemoryError | MemoryError)


def says_broken(error: BaseException) -> bool:
    """Whether no sequence can go on in this process, whatever is fed."""
    return isinstance(error, BROKEN) or is_out_of_memory(error)
