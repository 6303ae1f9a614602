"""What the front of a worker and its engine tell each other: a class per meaning, sequences by number.

They are two processes of one machine. What is told in one go travels as one message: a list of these.
"""

from typing import Any, Literal

from msgspec import Struct, msgpack
from pydantic import BaseModel

from outrider.decoding.settings import Sampling
from outrider.engine.loading.timings import LoadTimings
from outrider.engine.settings import EngineSettings
from outrider.engine.step_timings import StepTimings
from outrider.engine.work import Answered, EngineLoad, Result, Work

RefusalKind = Literal["grammar", "invalid", "too large", "failed"]


class EngineMessage(Struct, frozen=True, tag=True):
    pass


class StartEngine(EngineMessage, frozen=True):
    """The engine that is wanted: first, once."""

    settings: EngineSettings
    host: str | None  # on which rank 0 meets the other ranks; None where there are none


class Open(EngineMessage, frozen=True):
    """A new sequence, whose number is above those of all before."""

    sequence: int
    prompt_length: int
    noise_key: int
    sampling: Sampling


class Submit(EngineMessage, frozen=True):
    """Work for an open sequence. What the engine refuses ends it with the error."""

    work: Work
    round: int
    arrived: float  # reading of time.perf_counter, which all processes of a machine share


class Close(EngineMessage, frozen=True):
    """Nobody wants to hear of the sequence any more."""

    sequence: int


class AskReport(EngineMessage, frozen=True):
    """How busy the engine is, once it is done with what came before the question."""


class Stop(EngineMessage, frozen=True):
    """The engine's process is to end after the step under way."""


ToEngine = StartEngine | Open | Submit | Close | AskReport | Stop


class Meeting(EngineMessage, frozen=True):
    """Rank 0 waits for the other ranks at this port of its host."""

    port: int


class ProcessPlace(EngineMessage, frozen=True):
    """Where a process of an engine computes. It is told before the process loads anything."""

    rank: int
    pid: int
    gpus: str | None  # its CUDA_VISIBLE_DEVICES; None: it may see all of its node
    sees: tuple[str, ...]  # names of the GPUs that torch finds
    device: str  # name of the device that the process takes
    memory: int  # bytes of the device
    may_take: int  # bytes of those, at most
    threads: int
    interface: str | None  # network interface to other ranks; None: none, or left to chance
    node: str = ""  # id of Ray's node, told by the process that Ray started


class Ready(EngineMessage, frozen=True):
    """The engine is loaded."""

    settings: EngineSettings  # settings in force
    vocab_size: int
    max_length: int  # tokens of the longest sequence
    slow_because: tuple[str, ...]  # why steps on its GPU are slower than they could be
    promise: str  # how far the same seed gives the same text
    imports_s: float
    load_timings: LoadTimings


class Unbuilt(EngineMessage, frozen=True):
    """Why the engine could not be loaded."""

    error: str  # the exception's class
    reason: str


class Stepped(EngineMessage, frozen=True):
    """All that came of a step, and how busy the engine was after it. A step without results tells later."""

    results: tuple[Result, ...]
    rounds: tuple[int, ...]  # [results] which asked for them; 0 for a Failed
    load: EngineLoad
    finished_ns: int  # time of time.time_ns
    steps: tuple[StepTimings, ...]  # steps that were not reported yet


class Refused(EngineMessage, frozen=True):
    """A sequence could not be opened, or not go on as it was asked to; it is closed."""

    sequence: int
    kind: RefusalKind
    reason: str


class EngineReport(EngineMessage, frozen=True):
    """How busy the engine is."""

    load: EngineLoad
    free_memory: int  # bytes of the device's that nobody has taken


FromEngine = ProcessPlace | Meeting | Ready | Unbuilt | Stepped | Refused | EngineReport


class EngineAnswer(Struct, frozen=True):
    """A result as its sequence's stream hears of it."""

    round: int
    result: Answered
    load: EngineLoad
    finished_ns: int  # time of time.time_ns


def _to_plain(value: Any) -> Any:
    assert isinstance(value, BaseModel), f"{value!r} cannot travel between front and engine"
    return value.model_dump(exclude_defaults=True)


def _from_plain(kind: type[BaseModel], value: Any) -> BaseModel:
    return kind.model_validate(value)


encode = msgpack.Encoder(enc_hook=_to_plain).encode
decode_to_engine = msgpack.Decoder(list[ToEngine], dec_hook=_from_plain).decode
decode_from_engine = msgpack.Decoder(list[FromEngine], dec_hook=_from_plain).decode
