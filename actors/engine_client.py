"""Frontend's end of the connection to its engine: requests from the event loop, and their answers."""

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, TypeVar, cast

from actors.connection import Frames, frame_of
from actors.first_tokens import FirstTokens
from actors.messages import (
    AdapterLoaded,
    AskReport,
    Close,
    EngineAnswer,
    EngineReport,
    FromEngine,
    LoadAdapter,
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
from outrider.drafters.known_texts import NO_TEXTS, KnownTexts
from outrider.engine.errors import EngineError, SequenceFailedError, UnsupportedModelError
from outrider.engine.work import NONE_ASKED, AskedAdapter, Failed, Work
from outrider.learning.outbox import Outbox


class EngineStoppedError(Exception):
    """Raised when the engine has ended: no open sequence continues."""


class LeavingError(EngineStoppedError):
    """Raised when the worker is drained: open sequences continue at other workers."""


AnswerT = TypeVar("AnswerT")
Listener = Callable[[EngineAnswer | Exception], None]  # listener of a sequence; an exception is its last call

_REFUSALS: dict[str, type[Exception]] = {
    "grammar": GrammarError,
    "adapter": UnsupportedModelError,
    "invalid": ValueError,
    "too large": EngineError,
    "failed": SequenceFailedError,
}


class EngineClient(asyncio.Protocol):
    """Asyncio client of an engine. Messages of one iteration of the event loop are sent in one frame.

    ``end``: future that is done when no more sequences can be opened; its result is the reason.
    ``leaving``: future that is done when the worker is being drained.
    """

    def __init__(self, stepped: Callable[[Stepped], object] = lambda _: None) -> None:
        """stepped: called with all results of a step, before the listeners of its sequences."""
        self._stepped = stepped
        self._writing: asyncio.Task[None] | None = None
        self._frames = Frames()
        self._outbox = Outbox[ToEngine]()
        self._numbers = count()
        self._open: dict[int, Listener] = {}  # listeners by number of the sequence
        # Futures of answers, in the order of the questions.
        self._asking: list[asyncio.Future[EngineReport]] = []
        self._loading: list[asyncio.Future[AdapterLoaded]] = []
        self.first_tokens = FirstTokens()
        self._is_over = asyncio.Event()
        self._is_idle = asyncio.Event()  # set while no sequence is open
        self._is_idle.set()
        self.end: asyncio.Future[EngineStoppedError] = asyncio.get_running_loop().create_future()
        self.leaving: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def connect(self, connected: socket.socket) -> None:
        """Connects to a loaded engine; must be called first."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connected)

    def open(
        self,
        prompt_length: int,
        noise_key: int,
        sampling: Sampling,
        listener: Listener,
        adapter: AskedAdapter = NONE_ASKED,
        texts: KnownTexts = NO_TEXTS,
    ) -> int:
        """Returns the number of a new sequence. Raises EngineStoppedError once the engine has ended.

        Args:
            listener: called with each answer, and with the exception that ends the sequence, unless the
                sequence is closed.
            adapter: adapter of the sequence, which the engine loads if it is missing.
            texts: texts from which indices guess.
        """
        if self.end.done():
            raise self.end.result()
        number = next(self._numbers)
        self._open[number] = listener
        self._is_idle.clear()
        self.send(Open(number, prompt_length, noise_key, sampling, adapter, texts))
        return number

    def submit(self, round_number: int, work: Work) -> None:
        """Sends work to the engine, which reads it after its current step. Refused work ends the sequence."""
        self.send(Submit(work, round_number, time.perf_counter()))

    def close(self, number: int) -> None:
        """Frees everything that the engine holds for the sequence, and drops its listener. Idempotent."""
        if self._forget(number) is not None:
            self.send(Close(number))

    @property
    def open_sequences(self) -> int:
        """Number of open sequences: working, waiting or between two rounds."""
        return len(self._open)

    async def report(self) -> EngineReport:
        """Returns the engine's load after it has handled all earlier messages. Raises EngineStoppedError."""
        return await self._asked(self._asking, AskReport())

    async def load_adapter(self, adapter: AskedAdapter) -> bytes:
        """Makes the engine load an adapter between two steps; returns the digest of its files.

        Raises:
            UnsupportedModelError: the engine refuses the adapter.
            EngineStoppedError: the engine has ended.
        """
        loaded = await self._asked(self._loading, LoadAdapter(adapter))
        if loaded.refusal:
            raise UnsupportedModelError(loaded.refusal)
        return loaded.digest

    async def _asked(self, waiting: "list[asyncio.Future[AnswerT]]", question: ToEngine) -> AnswerT:
        """Asks a question and returns the answer; the engine answers questions of one kind in order."""
        if self._is_over.is_set():
            raise EngineStoppedError("the engine is gone")
        asked: asyncio.Future[AnswerT] = asyncio.get_running_loop().create_future()
        waiting.append(asked)
        self.send(question)
        return await asked

    async def drain(self, within_s: float) -> None:
        """Announces that the worker is being drained, and returns when no sequence is open.

        within_s: seconds after which the sequences that are still open end with LeavingError.
        """
        self.leaving.set_result(None)
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._is_idle.wait()
        self.leave()

    def leave(self) -> None:
        """Ends open sequences with LeavingError; later sequences are refused with it."""
        self._end_all(LeavingError("the worker is drained"))

    async def stop(self) -> None:
        """Stops the engine after its current step, and waits until it has ended."""
        self.leave()
        self.send(Stop())
        await self._is_over.wait()

    def send(self, message: ToEngine) -> None:
        """Sends a message, unless the engine has ended."""
        if not self._is_over.is_set():
            self._outbox.append(message)

    async def _write(self, transport: asyncio.Transport) -> None:
        while True:
            transport.write(frame_of(await self._outbox.woken()))

    # Callbacks of asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # a cast, because uvloop's transport has no base class
        self._writing = asyncio.create_task(self._write(cast(asyncio.Transport, transport)))

    def data_received(self, data: bytes) -> None:
        for content in self._frames.take(data):
            for message in decode_from_engine(content):
                self._on_message(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_over.set()
        if self._writing is not None:
            self._writing.cancel()
        self._end_all(EngineStoppedError("the engine is gone"))
        waiting: list[asyncio.Future[Any]] = [*self._asking, *self._loading]
        for asked in waiting:
            if not asked.done():  # the question may have been cancelled
                asked.set_exception(EngineStoppedError("the engine is gone"))

    def _on_message(self, message: FromEngine) -> None:
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
                _answer(self._asking, message)
            case AdapterLoaded():
                _answer(self._loading, message)
            case _:
                raise ValueError(f"{type(message).__name__} is no message of an engine that runs")

    def _put_last(self, number: int, error: Exception) -> None:
        """Passes the error with which the engine has closed a sequence to its listener."""
        if (listener := self._forget(number)) is not None:
            listener(error)

    def _forget(self, number: int) -> Listener | None:
        """Removes a sequence and returns its listener; None if it was not open."""
        listener = self._open.pop(number, None)
        if not self._open:
            self._is_idle.set()
        return listener

    def _end_all(self, error: EngineStoppedError) -> None:
        if not self.end.done():
            self.end.set_result(error)
        for number in list(self._open):
            listener = self._open[number]
            self.close(number)
            listener(error)


def _answer(waiting: "list[asyncio.Future[AnswerT]]", answer: AnswerT) -> None:
    """Answers the oldest question."""
    asked = waiting.pop(0)
    if not asked.done():  # the question may have been cancelled
        asked.set_result(answer)
