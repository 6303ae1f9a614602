"""Classifies exceptions of a step: they are the fault of a single sequence, or the process is broken."""

from typing import NoReturn

import torch

from outrider.decoding.grammar import GrammarError
from outrider.engine.errors import CacheLostError, RankLostError
from outrider.engine.sequence import EngineSequence

NO_MEMORY = ("can't allocate memory", "not enough memory")  # torch raises a plain RuntimeError on a CPU
BROKEN = (RankLostError, CacheLostError, torch.AcceleratorError, torch.distributed.DistError)


class NotFiniteError(Exception):
    """Error: the model computed NaN or infinity for a sequence."""

    def __init__(self) -> None:
        super().__init__("its logits, or its keys and values, are not finite numbers")


class BlamedError(Exception):
    """Error that is the fault of a single sequence; its cause is the original exception."""

    def __init__(self, sequence: EngineSequence) -> None:
        super().__init__(f"sequence {sequence.number}")
        self.sequence = sequence


def reason_of(error: BaseException) -> str:
    """Returns the reason to tell the client, without a library's message, which may quote the prompt."""
    return (
        str(error)
        if isinstance(error, NotFiniteError | GrammarError)
        else f"{type(error).__name__} in a step"
    )


def blame(sequence: EngineSequence, error: Exception) -> NoReturn:
    """Raises BlamedError for a caught exception, unless it means that the process is broken.

    Raises:
        BlamedError: the sequence cannot continue.
        Exception: the given error, if the process is broken.
    """
    if says_broken(error):
        raise error
    raise BlamedError(sequence) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means out of memory, so that a smaller step may succeed."""
    if isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY):
        return True
    return isinstance(error, torch.OutOfMemoryError | MemoryError)


def says_broken(error: BaseException) -> bool:
    """Whether the error means that this process can no longer serve any sequence."""
    return isinstance(error, BROKEN) or is_out_of_memory(error)
