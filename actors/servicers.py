"""One bidirectional stream per gateway: its messages become work for the engine, results become replies."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError

from actors.engine_client import EngineClient, EngineStoppedError, LeavingError
from actors.messages import Answer
from actors.tracing import StreamTrace
from outrider.decoding.logprobs import TokenLogprobs
from outrider.engine.errors import EngineError, SequenceFailedError
from outrider.engine.work import (
    AheadOutcome,
    Extend,
    Generate,
    Generated,
    Prepared,
    Propose,
    Proposed,
    Timings,
    TopUp,
    Verified,
    Verify,
    Work,
)
from protos import generation_pb2, rounds_pb2
from protos.conversions import draft_from_message, draft_to_message, sampling_from_message, step_to_message

logger = logging.getLogger("ray.serve")

RequestT = TypeVar("RequestT", rounds_pb2.DraftRequest, rounds_pb2.TargetRequest)
ReplyT = TypeVar("ReplyT", rounds_pb2.DraftReply, rounds_pb2.TargetReply)


TRACED_AFTER_S = 0.005  # that a span is made after its answer: all others of the same step are out by then

_CAUSES: tuple[tuple[type[Exception], rounds_pb2.Ended.Cause], ...] = (
    (LeavingError, rounds_pb2.Ended.LEAVING),
    (SequenceFailedError, rounds_pb2.Ended.FAILED),
    (EngineError, rounds_pb2.Ended.TOO_LARGE),
    (ValueError, rounds_pb2.Ended.INVALID),
)


class Servicer(ABC, Generic[RequestT, ReplyT]):
    """A stream carries the sequences of one gateway, which do not outlive it."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    @staticmethod
    @abstractmethod
    def work(sequence: int, request: RequestT) -> tuple[rounds_pb2.Turn, Work]:
        """The turn of a request, and the work that it asks for. Raises ValueError if it is malformed.

        sequence: its number at the engine.
        """

    @staticmethod
    @abstractmethod
    def reply(answer: Answer) -> ReplyT:
        """The message for a result of that work; it does not name its sequence yet."""

    @staticmethod
    @abstractmethod
    def replies(
        taken: list[rounds_pb2.Taken], replies: list[ReplyT], ended: list[rounds_pb2.Ended]
    ) -> rounds_pb2.DraftReplies | rounds_pb2.TargetReplies:
        """The message that carries them all."""

    async def Stream(  # noqa: N802
        self, requests: AsyncIterator[Any], context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> None:
        sequences = GatewaySequences[RequestT, ReplyT](self, self._engine)
        reading = asyncio.create_task(sequences.read(requests))
        self._engine.end.add_done_callback(sequences.wake)
        reading.add_done_callback(sequences.wake)
        try:
            while True:
                is_last = reading.done() or self._engine.end.done()
                if (told := sequences.news()) is not None:
                    await context.write(told)
                elif is_last:
                    break
                else:
                    await sequences.woken()
            if reading.done() and isinstance(reading.exception(), DecodeError):
                reason = "a message of the stream cannot be read"
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
            if self._engine.end.done() and not isinstance(self._engine.end.result(), LeavingError):
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(self._engine.end.result()))
        finally:
            self._engine.end.remove_done_callback(sequences.wake)
            reading.cancel()
            sequences.close()


@dataclass
class Served:
    """A sequence of a gateway."""

    number: int  # at the engine
    trace: StreamTrace
    newest: int = 0  # round: an older turn is void


Name = tuple[int, int]  # of a sequence at its gateway, and its epoch


class GatewaySequences(Generic[RequestT, ReplyT]):
    """Those of one stream: requests become work for the engine, answers become replies."""

    def __init__(self, servicer: Servicer[RequestT, ReplyT], engine: EngineClient) -> None:
        self._servicer: Servicer[RequestT, ReplyT] = servicer
        self._engine = engine
        self._later = partial(asyncio.get_running_loop().call_later, TRACED_AFTER_S)
        self._served: dict[Name, Served] = {}
        self._taken: list[rounds_pb2.Taken] = []
        self._replies: list[ReplyT] = []
        self._ended: list[rounds_pb2.Ended] = []
        self._has_news = asyncio.Event()

    async def read(self, requests: AsyncIterator[Any]) -> None:
        """Until the gateway has no more to say. Raises DecodeError."""
        async for several in requests:
            for request in several.requests:
                self._take(request)

    def news(self) -> Any:
        """A message with all that the gateway has not heard, None where that is nothing."""
        if not (self._taken or self._replies or self._ended):
            return None
        told = self._servicer.replies(self._taken, self._replies, self._ended)
        self._taken, self._replies, self._ended = [], [], []
        return told

    def wake(self, _: object = None) -> None:
        """Whoever waits for news is to look for himself."""
        self._has_news.set()

    async def woken(self) -> None:
        await self._has_news.wait()
        self._has_news.clear()

    def close(self) -> None:
        """The stream is over."""
        for served in self._served.values():
            self._engine.close(served.number)
            served.trace.ended()
        self._served.clear()

    def _take(self, request: RequestT) -> None:
        name = request.sequence, request.epoch
        served, kind = self._served.get(name), request.WhichOneof("request")
        try:
            if kind == "open":
                if served is not None:
                    raise ValueError(f"sequence={name[0]} of epoch={name[1]} is open already")
                self._open(name, request.open)
            elif served is None:
                if kind != "close":
                    raise ValueError(
                        f"sequence={name[0]} of epoch={name[1]} is not open: its first message must be Open"
                    )
            elif kind == "close":
                self._engine.close(served.number)
                self._forget(name)
            else:
                self._submit(served, request)
        except (ValueError, EngineStoppedError) as error:
            self._end(name, error)
        except Exception as error:  # a defect of ours, and no reason to give up the others
            logger.exception("a request of a gateway failed")
            self._end(name, SequenceFailedError(type(error).__name__))

    def _open(self, name: Name, opening: rounds_pb2.Open) -> None:
        number = self._engine.open(
            opening.prompt_length,
            opening.noise_key,
            sampling_from_message(opening.sampling),
            partial(self._hear, name),
        )
        self._served[name] = Served(number, StreamTrace(self._later))
        self._taken.append(rounds_pb2.Taken(sequence=name[0], epoch=name[1]))
        self.wake()

    def _submit(self, served: Served, request: RequestT) -> None:
        turn, work = self._servicer.work(served.number, request)
        if turn.round >= served.newest:
            served.newest = turn.round
            served.trace.asked(turn)
            self._engine.submit(turn.round, work)

    def _hear(self, name: Name, answer: Answer | Exception) -> None:
        if isinstance(answer, Exception):
            self._end(name, answer)
            return
        try:
            self._served[name].trace.answered(answer)
            reply = self._servicer.reply(answer)
        except Exception as error:
            logger.exception("an answer of the engine failed")
            self._end(name, SequenceFailedError(type(error).__name__))
            return
        reply.sequence, reply.epoch = name
        self._replies.append(reply)
        self.wake()

    def _end(self, name: Name, error: Exception) -> None:
        """Says so, and frees what is held. Where the engine is gone the end of the stream says it."""
        if name in self._served:
            self._engine.close(self._served[name].number)
            self._forget(name)
        details = str(error)
        if isinstance(error, SequenceFailedError):
            details = f"the engine cannot go on with this sequence: {error}"
        for kind, cause in _CAUSES:
            if isinstance(error, kind):
                sequence, epoch = name
                self._ended.append(
                    rounds_pb2.Ended(sequence=sequence, epoch=epoch, cause=cause, details=details)
                )
                self.wake()
                return

    def _forget(self, name: Name) -> None:
        self._served.pop(name).trace.ended()


class DraftServicer(Servicer[rounds_pb2.DraftRequest, rounds_pb2.DraftReply]):
    @staticmethod
    def work(sequence: int, request: rounds_pb2.DraftRequest) -> tuple[rounds_pb2.Turn, Work]:
        if request.WhichOneof("request") != "propose":
            raise ValueError("after Open a draft worker takes Propose and Close")
        propose, turn = request.propose, request.propose.turn
        return turn, Propose(
            sequence=sequence,
            base=turn.base,
            tokens=tuple(turn.tokens),
            depth=propose.depth,
            leaves=propose.leaves,
            round=turn.round,
        )

    @staticmethod
    def reply(answer: Answer) -> rounds_pb2.DraftReply:
        result = answer.result
        assert isinstance(result, Proposed | Prepared)
        reply = rounds_pb2.DraftReply(
            round=answer.round, timings=_timings(result.timings), load=_load(answer)
        )
        draft = draft_to_message(result.draft)
        if isinstance(result, Prepared):
            reply.prepared.CopyFrom(rounds_pb2.Prepared(draft=draft))
        else:
            ahead = None if result.ahead is None else _ahead_outcome(result.ahead)
            reply.proposed.CopyFrom(rounds_pb2.Proposed(draft=draft, ahead=ahead))
        return reply

    @staticmethod
    def replies(
        taken: list[rounds_pb2.Taken], replies: list[rounds_pb2.DraftReply], ended: list[rounds_pb2.Ended]
    ) -> rounds_pb2.DraftReplies:
        return rounds_pb2.DraftReplies(taken=taken, replies=replies, ended=ended)


class TargetServicer(Servicer[rounds_pb2.TargetRequest, rounds_pb2.TargetReply]):
    @staticmethod
    def work(sequence: int, request: rounds_pb2.TargetRequest) -> tuple[rounds_pb2.Turn, Work]:
        match request.WhichOneof("request"):
            case "verify":
                return request.verify.turn, _verify(sequence, request.verify)
            case "extend":
                return request.extend.turn, _extend(sequence, request.extend)
            case "plain":
                return request.plain.turn, _until(Generate, sequence, request.plain)
            case "top_up":
                return request.top_up.turn, _until(TopUp, sequence, request.top_up)
        raise ValueError("after Open a target worker takes Verify, Extend, Plain, TopUp and Close")

    @staticmethod
    def reply(answer: Answer) -> rounds_pb2.TargetReply:
        result, draft = answer.result, None
        if isinstance(result, Verified):
            accepted, tokens = result.verdict.accepted, result.verdict.tokens
            draft = None if result.draft is None else draft_to_message(result.draft)
        else:
            assert isinstance(result, Generated)
            accepted, tokens = (), (result.token,)
        return rounds_pb2.TargetReply(
            round=answer.round,
            accepted=accepted,
            tokens=tokens,
            logprobs=[_logprobs(position) for position in result.logprobs],
            finish_reason=result.finish,
            draft=draft,
            timings=_timings(result.timings),
            load=_load(answer),
        )

    @staticmethod
    def replies(
        taken: list[rounds_pb2.Taken], replies: list[rounds_pb2.TargetReply], ended: list[rounds_pb2.Ended]
    ) -> rounds_pb2.TargetReplies:
        return rounds_pb2.TargetReplies(taken=taken, replies=replies, ended=ended)


def _verify(sequence: int, message: rounds_pb2.Verify) -> Verify:
    turn, draft = message.turn, draft_from_message(message.draft)
    return Verify(
        sequence=sequence,
        base=turn.base,
        tokens=tuple(turn.tokens),
        draft=draft,
        round=turn.round,
        next_depth=message.next_depth,
        next_leaves=message.next_leaves,
    )


def _extend(sequence: int, message: rounds_pb2.Extend) -> Extend:
    turn, draft = message.turn, draft_from_message(message.draft)
    return Extend(sequence=sequence, base=turn.base, tokens=tuple(turn.tokens), draft=draft, round=turn.round)


def _until(
    kind: type[Generate] | type[TopUp], sequence: int, message: rounds_pb2.Plain | rounds_pb2.TopUp
) -> Generate | TopUp:
    turn = message.turn
    count = message.until - turn.base - len(turn.tokens)
    return kind(sequence=sequence, base=turn.base, tokens=tuple(turn.tokens), count=count)


def _logprobs(position: TokenLogprobs) -> generation_pb2.TokenLogprobs:
    return generation_pb2.TokenLogprobs(
        logprob=position.chosen,
        token_ids=[token_id for token_id, _ in position.top],
        logprobs=[logprob for _, logprob in position.top],
    )


def _timings(timings: Timings) -> rounds_pb2.Timings:
    return rounds_pb2.Timings(
        queue_ns=int(timings.queue * 1e9),
        forward_ns=int(timings.forward * 1e9),
        step_ns=int(timings.step * 1e9),
        total_ns=int(timings.total * 1e9),
        last_step=step_to_message(timings.last_step),
    )


def _ahead_outcome(ahead: AheadOutcome) -> rounds_pb2.AheadOutcome:
    return rounds_pb2.AheadOutcome(
        tokens=ahead.tokens,
        rank=ahead.rank,
        saved_ns=int(ahead.saved * 1e9),
        wasted_tokens=ahead.wasted,
    )


def _load(answer: Answer) -> rounds_pb2.Load:
    load = answer.load
    return rounds_pb2.Load(
        decoding=load.decoding,
        running=load.running,
        waiting=load.waiting,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
    )
