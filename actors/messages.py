"""Messages between a worker's frontend and its engine, a class for each kind; sequences are numbers.

Frontend and engine are two processes of one machine. One frame carries a list of messages.
"""

from typing import Any, Literal

from msgspec import Struct, msgpack
from pydantic import BaseModel

from outrider.decoding.settings import Sampling
from outrider.drafters.known_texts import NO_TEXTS, KnownTexts
from outrider.engine.loading.timings import LoadTimings
from outrider.engine.planning.promise import Promise
from outrider.engine.settings import EngineSettings
from outrider.engine.step_timings import StepTimings
from outrider.engine.work import NONE_ASKED, Answered, AskedAdapter, EngineLoad, Result, Work
from outrider.pace.step import Step

RefusalKind = Literal["grammar", "adapter", "invalid", "too large", "failed"]


class EngineMessage(Struct, frozen=True, tag=True):
    pass


class StartEngine(EngineMessage, frozen=True):
    """First message: the engine to load."""

    settings: EngineSettings
    host: str | None  # address at which rank 0 meets the other ranks; None: a single rank


class Open(EngineMessage, frozen=True):
    """Opens a sequence, whose number is above all earlier numbers."""

    sequence: int
    prompt_length: int
    noise_key: int
    sampling: Sampling
    adapter: AskedAdapter = NONE_ASKED
    texts: KnownTexts = NO_TEXTS


class Submit(EngineMessage, frozen=True):
    """Work for an open sequence. Refused work ends the sequence with the error."""

    work: Work
    round: int
    arrived: float  # reading of time.perf_counter, which all processes of a machine share


class Close(EngineMessage, frozen=True):
    """Closes a sequence: its results are no longer wanted."""

    sequence: int


class LoadAdapter(EngineMessage, frozen=True):
    """Loads an adapter between two steps."""

    adapter: AskedAdapter


class DropAdapter(EngineMessage, frozen=True):
    """Drops the adapter with that digest once its last sequence has closed."""

    digest: bytes


class AskReport(EngineMessage, frozen=True):
    """Asks for the engine's load after all earlier messages."""


class Stop(EngineMessage, frozen=True):
    """Ends the engine's process after the current step."""


ToEngine = StartEngine | Open | Submit | Close | LoadAdapter | DropAdapter | AskReport | Stop


class Meeting(EngineMessage, frozen=True):
    """Port of its host at which rank 0 waits for the other ranks."""

    port: int


class ProcessPlace(EngineMessage, frozen=True):
    """Place of a process of an engine: its node and devices. Sent before the process loads anything."""

    rank: int
    pid: int
    gpus: str | None  # its CUDA_VISIBLE_DEVICES; None: it may see all GPUs of its node
    sees: tuple[str, ...]  # names of the GPUs that torch finds
    device: str  # name of the device that the process takes
    memory: int  # bytes of the device
    may_take: int  # bytes of the device's memory that the process may take
    threads: int
    interface: str | None  # network interface to other ranks; None: no ranks, or not set
    node: str = ""  # id of Ray's node, told by the process that Ray started


class Ready(EngineMessage, frozen=True):
    """Facts about the loaded engine."""

    settings: EngineSettings  # settings in force
    vocab_size: int
    max_length: int  # tokens of the longest sequence
    slow_because: tuple[str, ...]  # reasons why steps on its GPU are slower than they could be
    promise: Promise  # how far the same seed gives the same text
    imports_s: float
    load_timings: LoadTimings
    survey: dict[str, tuple[Step, ...]]  # see outrider/engine/loop/survey.py


class Unbuilt(EngineMessage, frozen=True):
    """Reason why the engine could not be loaded."""

    error: str  # name of the exception's class
    reason: str


class Stepped(EngineMessage, frozen=True):
    """Results of a step, and the engine's load after it. A step without results is reported later."""

    results: tuple[Result, ...]
    rounds: tuple[int, ...]  # [results] rounds that asked for them; 0 for a Failed
    load: EngineLoad
    finished_ns: int  # reading of time.time_ns
    steps: tuple[StepTimings, ...]  # steps that were not reported yet


class Refused(EngineMessage, frozen=True):
    """Refusal of a sequence, which is closed now, or of its work."""

    sequence: int
    kind: RefusalKind
    reason: str


class AdapterLoaded(EngineMessage, frozen=True):
    """Answer to LoadAdapter."""

    digest: bytes
    refusal: str = ""  # reason why it was not loaded; empty: it was loaded


class EngineReport(EngineMessage, frozen=True):
    """Load of the engine."""

    load: EngineLoad
    free_memory: int  # bytes of the device's memory that are free


FromEngine = ProcessPlace | Meeting | Ready | Unbuilt | Stepped | Refused | AdapterLoaded | EngineReport


class EngineAnswer(Struct, frozen=True):
    """Result of the engine, in the form that the stream of its sequence receives."""

    round: int
    result: Answered
    load: EngineLoad
    finished_ns: int  # reading of time.time_ns


def _to_plain(value: Any) -> Any:
    assert isinstance(value, BaseModel), f"{value!r} cannot travel between frontend and engine"
    return value.model_dump(exclude_defaults=True)


def _from_plain(kind: type[BaseModel], value: Any) -> BaseModel:
    return kind.model_validate(value)


encode = msgpack.Encoder(enc_hook=_to_plain).encode
decode_to_engine = msgpack.Decoder(list[ToEngine], dec_hook=_from_plain).decode
decode_from_engine = msgpack.Decoder(list[FromEngine], dec_hook=_from_plain).decode
