"""What the front of a worker tells its engine and what it hears: a class per meaning, sequences by number."""

from dataclasses import dataclass

from outrider.decoding.settings import Sampling
from outrider.engine.work import Answered, Load, Work


@dataclass(frozen=True)
class Open:
    """A new sequence, whose number is above those of all before."""

    sequence: int
    prompt_length: int
    noise_key: int
    sampling: Sampling


@dataclass(frozen=True)
class Submit:
    """Work for an open sequence. What the engine refuses ends it with the error."""

    work: Work
    round: int
    arrived: float  # by time.perf_counter


@dataclass(frozen=True)
class Close:
    """Nobody wants to hear of the sequence any more."""

    sequence: int


@dataclass(frozen=True)
class Leave:
    """Whatever is open ends with LeavingError, and what comes later too."""


@dataclass(frozen=True)
class Stop:
    """The same, and nothing is taken after it."""


ToEngine = Open | Submit | Close | Leave | Stop


@dataclass(frozen=True)
class Answer:
    """A result, the round that asked for it, and how busy the engine was after the step."""

    round: int
    result: Answered
    load: Load
    finished_ns: int  # by time.time_ns
