"""One bidirectional stream per sequence: its messages become work for the engine, results become replies."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError

from actors.engine_loop import EngineLoop, EngineStoppedError, LeavingError, OpenSequence
from actors.messages import Answer
from actors.tracing import StreamTrace
from outrider.decoding.sampling import TokenLogprobs
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
from protos.stream_status import FAILED, LEAVING, TAKEN

RequestT = TypeVar("RequestT", rounds_pb2.DraftRequest, rounds_pb2.TargetRequest)
ReplyT = TypeVar("ReplyT", rounds_pb2.DraftReply, rounds_pb2.TargetReply)


TRACED_AFTER_S = 0.005  # that a span is made after its answer: all others of the same step are out by then


class Servicer(ABC, Generic[RequestT, ReplyT]):
    """A sequence lives as long as its stream."""

    def __init__(self, engine_loop: EngineLoop) -> None:
        self._engine_loop = engine_loop

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

    def _named(self, reply: ReplyT, opening: RequestT) -> ReplyT:
        reply.sequence, reply.epoch = opening.sequence, opening.epoch
        return reply

    async def Stream(  # noqa: N802
        self, requests: AsyncIterator[RequestT], context: "grpc.aio.ServicerContext[RequestT, ReplyT]"
    ) -> None:
        try:
            opening = await _opening(requests)
            # A stream may be cancelled here: nothing is open yet.
            await context.send_initial_metadata((TAKEN,))
            sequence = self._engine_loop.open(
                opening.open.prompt_length,
                opening.open.noise_key,
                sampling_from_message(opening.open.sampling),
            )
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        trace = StreamTrace(partial(asyncio.get_running_loop().call_later, TRACED_AFTER_S))
        reading = asyncio.create_task(self._read(requests, sequence, opening, trace))
        try:
            async for answer in sequence.answers():
                trace.answered(answer)
                await context.write(self._named(self.reply(answer), opening))
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except SequenceFailedError as error:
            await context.abort(FAILED, f"the engine cannot go on with this sequence: {error}")
        except EngineError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except LeavingError as error:
            await context.abort(LEAVING, str(error))
        except EngineStoppedError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        finally:
            # A coroutine is cancelled at once; a generator would be closed whenever it is collected.
            reading.cancel()
            sequence.close()
            trace.ended()

    async def _read(
        self, requests: AsyncIterator[RequestT], sequence: OpenSequence, opening: RequestT, trace: StreamTrace
    ) -> None:
        """Hands the work on until the sender closes; a turn older than another is void."""
        newest = 0
        try:
            async for request in requests:
                if request.WhichOneof("request") == "close":
                    break
                for name in ("sequence", "epoch"):
                    told, opened = getattr(request, name), getattr(opening, name)
                    if told != opened:
                        raise ValueError(f"{name}={told}, this stream was opened with {opened}")
                turn, work = self.work(sequence.number, request)
                if turn.round >= newest:
                    newest = turn.round
                    trace.asked(turn)
                    sequence.submit(turn.round, work)
            sequence.put(None)
        except DecodeError:
            sequence.put(ValueError("a message of the stream cannot be read"))
        except Exception as error:
            sequence.put(error)


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


async def _opening(requests: AsyncIterator[RequestT]) -> RequestT:
    """The first message."""
    with suppress(DecodeError):
        async for request in requests:
            if request.WhichOneof("request") == "open":
                return request
            break
    raise ValueError("the first message of a stream must be Open")


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
