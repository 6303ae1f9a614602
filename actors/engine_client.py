"""The front's end of the connection to its engine: what the event loop asks, and what it hears."""

import asyncio
import socket
import time
from collections.abc import Callable
from itertools import count
from typing import cast

from actors.connection import Frames, frame_of
from actors.messages import (
    AskReport,
    Close,
    EngineAnswer,
    EngineReport,
    FromEngine,
    Open,
    Refused,
    Stepped,
    Stop,
    Submit,
    ToEngine,
    decode_from_engine,
)
from outrider.decoding.grammar import GrammarError
from outrider.decoding.settings import Sampling
from outrider.engine.errors import EngineError, SequenceFailedError
from outrider.engine.work import Failed, Work


class EngineStoppedError(Exception):
    """The engine is gone: nothing that was open goes on."""


class LeavingError(EngineStoppedError):
    """The worker is drained: what was open goes on elsewhere."""


Hear = Callable[[EngineAnswer | Exception], None]  # an exception comes last

_REFUSALS: dict[str, type[Exception]] = {
    "grammar": GrammarError,
    "invalid": ValueError,
    "too large": EngineError,
    "failed": SequenceFailedError,
}


class EngineClient(asyncio.Protocol):
    """Belongs to the event loop. What is told while it turns once reaches the engine in one message.

    ``end``: why nothing can be opened any more, once that is so.
    """

    def __init__(self, stepped: Callable[[Stepped], object] = lambda _: None) -> None:
        """stepped: called with all that comes of a step, before those hear of it who asked."""
        self._stepped = stepped
        self._transport: asyncio.Transport | None = None
        self._frames = Frames()
        self._untold: list[ToEngine] = []
        self._numbers = count()
        self._open: dict[int, Hear] = {}  # listeners by number of the sequence
        self._asking: list[asyncio.Future[EngineReport]] = []  # in the order of their questions
        self._is_over = asyncio.Event()
        self.end: asyncio.Future[EngineStoppedError] = asyncio.get_running_loop().create_future()

    async def connect(self, connected: socket.socket) -> None:
        """Before anything else: to an engine that is loaded."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connected)

    def open(self, prompt_length: int, noise_key: int, sampling: Sampling, hear: Hear) -> int:
        """The number of a new sequence. Raises EngineStoppedError once there is an end.

        hear: called with its answers as they come, and with the exception that ends it unless it is closed.
        """
        if self.end.done():
            raise self.end.result()
        number = next(self._numbers)
        self._open[number] = hear
        self.tell(Open(number, prompt_length, noise_key, sampling))
        return number

    def submit(self, round_number: int, work: Work) -> None:
        """Has the engine do it, once it is done with its step. What it refuses ends the sequence."""
        self.tell(Submit(work, round_number, time.perf_counter()))

    def close(self, number: int) -> None:
        """Frees what the engine holds for the sequence, of which nothing more is heard. Twice is as once."""
        if self._open.pop(number, None) is not None:
            self.tell(Close(number))

    @property
    def open_sequences(self) -> int:
        """Working, waiting or between two rounds."""
        return len(self._open)

    async def report(self) -> EngineReport:
        """How busy the engine is, once it is done with what came before. Raises EngineStoppedError."""
        if self._is_over.is_set():
            raise EngineStoppedError("the engine is gone")
        asked: asyncio.Future[EngineReport] = asyncio.get_running_loop().create_future()
        self._asking.append(asked)
        self.tell(AskReport())
        return await asked

    def leave(self) -> None:
        """Ends whatever is open with LeavingError, and what comes later too."""
        self._end_all(LeavingError("the worker is drained"))

    async def stop(self) -> None:
        """Returns once the engine has ended, after the step under way."""
        self.leave()
        self.tell(Stop())
        await self._is_over.wait()

    def tell(self, message: ToEngine) -> None:
        """Sends a message, unless the engine is gone."""
        if self._is_over.is_set():
            return
        if not self._untold:
            asyncio.get_running_loop().call_soon(self._flush)
        self._untold.append(message)

    def _flush(self) -> None:
        assert self._transport is not None
        untold, self._untold = self._untold, []
        self._transport.write(frame_of(untold))

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's inherits from nothing

    def data_received(self, data: bytes) -> None:
        for content in self._frames.take(data):
            for message in decode_from_engine(content):
                self._hear(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_over.set()
        self._end_all(EngineStoppedError("the engine is gone"))
        for asked in self._asking:
            if not asked.done():  # whoever asked may have given up
                asked.set_exception(EngineStoppedError("the engine is gone"))

    def _hear(self, message: FromEngine) -> None:
        match message:
            case Stepped():
                self._stepped(message)
                for result, round_number in zip(message.results, message.rounds, strict=True):
                    if isinstance(result, Failed):
                        kind = GrammarError if result.is_grammars else SequenceFailedError
                        self._put_last(result.sequence, kind(result.reason))
                    elif result.sequence in self._open:
                        answer = EngineAnswer(round_number, result, message.load, message.finished_ns)
                        self._open[result.sequence](answer)
            case Refused():
                self._put_last(message.sequence, _REFUSALS[message.kind](message.reason))
            case EngineReport():
                asked = self._asking.pop(0)
                if not asked.done():
                    asked.set_result(message)
            case _:
                raise ValueError(f"{type(message).__name__} is no message of an engine that runs")

    def _put_last(self, number: int, error: Exception) -> None:
        """The engine has closed the sequence."""
        if (hear := self._open.pop(number, None)) is not None:
            hear(error)

    def _end_all(self, error: EngineStoppedError) -> None:
        if not self.end.done():
            self.end.set_result(error)
        for number in list(self._open):
            hear = self._open[number]
            self.close(number)
            hear(error)
