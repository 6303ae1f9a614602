"""Sequences of a gateway at a worker: requests become work for the engine, answers become replies."""

import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

from actors.engine_client import EngineClient, EngineStoppedError, LeavingError
from actors.messages import EngineAnswer
from actors.tracing import DelayedSpans, SequenceTrace
from actors.translation import FromFrontend, ReplyT, RequestT, Translation
from outrider.decoding.grammar import GrammarError
from outrider.engine.errors import EngineError, SequenceFailedError, UnsupportedModelError
from outrider.engine.work import AskedAdapter, Decoded
from outrider.learning.outbox import Outbox
from protos import rounds_pb2
from protos.conversions import sampling_from_message, texts_from_message

logger = logging.getLogger(f"ray.serve.{__name__}")

_CAUSES: tuple[tuple[type[Exception], rounds_pb2.SequenceEnded.Cause], ...] = (
    (LeavingError, rounds_pb2.SequenceEnded.LEAVING),
    (SequenceFailedError, rounds_pb2.SequenceEnded.FAILED),
    (UnsupportedModelError, rounds_pb2.SequenceEnded.ADAPTER),
    (EngineError, rounds_pb2.SequenceEnded.TOO_LARGE),
    (GrammarError, rounds_pb2.SequenceEnded.GRAMMAR),
    (ValueError, rounds_pb2.SequenceEnded.INVALID),
)


@dataclass
class Served:
    """Sequence of a gateway. The engine opens it with its first work; until then it costs nothing."""

    opening: rounds_pb2.Open
    trace: SequenceTrace
    number: int | None = None  # number at the engine; None: not opened there yet
    newest: int = 0  # newest round; turns of older rounds are ignored
    asked_at: float | None = None  # time.perf_counter() of its request; None: no first token is awaited


Name = tuple[int, int]  # number of a sequence at its gateway, and its epoch


class GatewaySequences(Generic[RequestT, ReplyT]):
    """Sequences of one stream. ``outbox``: messages to their gateway."""

    def __init__(self, translation: Translation[RequestT, ReplyT], engine: EngineClient) -> None:
        self._translation: Translation[RequestT, ReplyT] = translation
        self._engine = engine
        self.outbox: Outbox[FromFrontend | ReplyT] = Outbox()
        self._spans = DelayedSpans()
        self._served: dict[Name, Served] = {}

    async def read(self, requests: AsyncIterator[Any]) -> None:
        """Handles messages until the gateway ends its side of the stream. Raises DecodeError."""
        async for several in requests:
            for request in several.requests:
                self._take(request)

    def end_unopened(self, end: EngineStoppedError) -> None:
        """Ends the sequences that the engine has not opened; the engine ends its own sequences."""
        for name in [name for name, served in self._served.items() if served.number is None]:
            self._end(name, end)

    def close(self) -> None:
        """Closes all sequences at the end of the stream."""
        for name in [*self._served]:
            self._forget(name)
        self._spans.record_all()

    def _take(self, request: RequestT) -> None:
        name = request.sequence, request.epoch
        served, kind = self._served.get(name), request.WhichOneof("request")
        try:
            if kind == "open":
                if served is not None:
                    raise ValueError(f"sequence={name[0]} of epoch={name[1]} is open already")
                self._open(name, request.open)
            elif served is None:
                if kind != "close" and not self._engine.end.done():  # else Open was refused
                    raise ValueError(
                        f"sequence={name[0]} of epoch={name[1]} is not open: its first message must be Open"
                    )
            elif kind == "close":
                self._forget(name)
            else:
                self._submit(name, served, request)
        except (ValueError, EngineStoppedError) as error:
            self._end(name, error)
        except Exception as error:  # a defect of this code must not end other sequences
            logger.exception("a request of a gateway failed")
            self._end(name, SequenceFailedError(type(error).__name__))

    def _open(self, name: Name, opening: rounds_pb2.Open) -> None:
        if self._engine.end.done():
            raise self._engine.end.result()
        is_coupled = opening.sampling.verification in ("", "coupled")  # empty: not set, which means coupled
        self._served[name] = Served(opening, SequenceTrace(self._spans.add, is_coupled=is_coupled))
        self.outbox.append(rounds_pb2.Opened(sequence=name[0], epoch=name[1]))

    def _submit(self, name: Name, served: Served, request: RequestT) -> None:
        if served.number is None:
            opening = served.opening
            served.number = self._engine.open(
                opening.prompt_length,
                opening.noise_key,
                sampling_from_message(opening.sampling),
                partial(self._on_answer, name),
                asked_adapter(opening.adapter),
                texts_from_message(opening),
            )
        turn, work = self._translation.work(served.number, request)
        if served.newest == 0 and len(turn.tokens) == served.opening.prompt_length:  # no answer yet
            served.asked_at = time.perf_counter() - served.opening.queued_ms / 1000
        if turn.round >= served.newest:
            served.newest = turn.round
            served.trace.asked(turn)
            self._engine.submit(turn.round, work)

    def _on_answer(self, name: Name, answer: EngineAnswer | Exception) -> None:
        if isinstance(answer, Exception):
            self._end(name, answer)
            return
        served = self._served[name]
        if served.asked_at is not None and isinstance(answer.result, Decoded):
            self._engine.first_tokens.add(time.perf_counter() - served.asked_at)
            served.asked_at = None
        try:
            served.trace.answered(answer)
            reply = self._translation.reply(answer)
        except Exception as error:
            logger.exception("an answer of the engine failed")
            self._end(name, SequenceFailedError(type(error).__name__))
            return
        reply.sequence, reply.epoch = name
        self.outbox.append(reply)

    def _end(self, name: Name, error: Exception) -> None:
        """Reports the error and frees the sequence. If the engine has ended, the stream's end reports it."""
        if name in self._served:
            self._forget(name)
        details = str(error)
        logger.debug("sequence %d of epoch %d is ended: %s", *name, details)
        if isinstance(error, SequenceFailedError):
            details = f"the engine cannot go on with this sequence: {error}"
        for kind, cause in _CAUSES:
            if isinstance(error, kind):
                sequence, epoch = name
                self.outbox.append(
                    rounds_pb2.SequenceEnded(sequence=sequence, epoch=epoch, cause=cause, details=details)
                )
                return

    def _forget(self, name: Name) -> None:
        served = self._served.pop(name)
        if served.number is not None:
            self._engine.close(served.number)
        served.trace.ended()


def asked_adapter(message: rounds_pb2.Adapter) -> AskedAdapter:
    """Returns the adapter that a message names; an unset message names none."""
    return AskedAdapter(message.name, message.path, message.digest)
