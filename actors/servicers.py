"""One bidirectional stream per sequence: its messages become work for the engine, results become replies."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError

from actors.engine_loop import Answer, EngineLoop, EngineStoppedError, LeavingError, OpenSequence
from actors.tracing import StreamTrace
from outrider.decoding.sampling import TokenLogprobs
from outrider.engine.errors import EngineError, SequenceFailedError
from outrider.engine.sequence import Sequence
from outrider.engine.work import (
    AheadOutcome,
    Generate,
    Generated,
    Prepared,
    Propose,
    Proposed,
    Timings,
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

    @abstractmethod
    def work(self, request: RequestT) -> tuple[rounds_pb2.Turn, Callable[[Sequence], Work]]:
        """The turn of a request, and the work that it asks for. Raises ValueError if it is malformed."""

    @abstractmethod
    def reply(self, answer: Answer, epoch: int) -> ReplyT:
        """The message for a result of that work."""

    async def Stream(  # noqa: N802
        self, requests: AsyncIterator[RequestT], context: "grpc.aio.ServicerContext[RequestT, ReplyT]"
    ) -> None:
        try:
            opening = await _opening(requests)
            # A stream may be cancelled here: nothing is open yet.
            await context.send_initial_metadata((TAKEN,))
            sequence = self._engine_loop.open(
                opening.prompt_length, opening.noise_key, sampling_from_message(opening.sampling)
            )
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        trace = StreamTrace(partial(asyncio.get_running_loop().call_later, TRACED_AFTER_S))
        reading = asyncio.create_task(self._read(requests, sequence, opening.epoch, trace))
        try:
            async for answer in sequence.answers():
                trace.answered(answer)
                await context.write(self.reply(answer, opening.epoch))
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
        self, requests: AsyncIterator[RequestT], sequence: OpenSequence, epoch: int, trace: StreamTrace
    ) -> None:
        """Hands the work on until the sender closes; a turn older than another is void."""
        newest = 0
        try:
            async for request in requests:
                if request.WhichOneof("request") == "close":
                    break
                turn, work = self.work(request)
                if turn.epoch != epoch:
                    raise ValueError(f"epoch={turn.epoch}, this stream was opened with {epoch}")
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
    def work(self, request: rounds_pb2.DraftRequest) -> tuple[rounds_pb2.Turn, Callable[[Sequence], Work]]:
        if request.WhichOneof("request") != "propose":
            raise ValueError("after Open a draft worker takes Propose and Close")
        propose, turn = request.propose, request.propose.turn
        return turn, lambda sequence: Propose(
            sequence=sequence,
            base=turn.base,
            tokens=tuple(turn.tokens),
            depth=propose.depth,
            leaves=propose.leaves,
            round=turn.round,
        )

    def reply(self, answer: Answer, epoch: int) -> rounds_pb2.DraftReply:
        result = answer.result
        assert isinstance(result, Proposed | Prepared)
        ahead = result.ahead if isinstance(result, Proposed) else None
        return rounds_pb2.DraftReply(
            epoch=epoch,
            round=answer.round,
            draft=draft_to_message(result.draft),
            timings=_timings(result.timings),
            load=_load(answer),
            ahead=None if ahead is None else _ahead(ahead),
        )


class TargetServicer(Servicer[rounds_pb2.TargetRequest, rounds_pb2.TargetReply]):
    def work(self, request: rounds_pb2.TargetRequest) -> tuple[rounds_pb2.Turn, Callable[[Sequence], Work]]:
        kind = request.WhichOneof("request")
        if kind == "verify":
            return request.verify.turn, _verify(request.verify)
        if kind == "plain":
            return request.plain.turn, _generate(request.plain)
        raise ValueError("after Open a target worker takes Verify, Plain and Close")

    def reply(self, answer: Answer, epoch: int) -> rounds_pb2.TargetReply:
        result = answer.result
        if isinstance(result, Verified):
            accepted, tokens = result.verdict.accepted, result.verdict.tokens
        else:
            assert isinstance(result, Generated)
            accepted, tokens = (), (result.token,)
        return rounds_pb2.TargetReply(
            epoch=epoch,
            round=answer.round,
            accepted=accepted,
            tokens=tokens,
            logprobs=[_logprobs(position) for position in result.logprobs],
            finish_reason=result.finish,
            timings=_timings(result.timings),
            load=_load(answer),
        )


def _verify(message: rounds_pb2.Verify) -> Callable[[Sequence], Work]:
    turn, draft = message.turn, draft_from_message(message.draft)
    return lambda sequence: Verify(
        sequence=sequence, base=turn.base, tokens=tuple(turn.tokens), draft=draft, round=turn.round
    )


def _generate(message: rounds_pb2.Plain) -> Callable[[Sequence], Work]:
    turn = message.turn
    count = message.until - turn.base - len(turn.tokens)
    return lambda sequence: Generate(
        sequence=sequence, base=turn.base, tokens=tuple(turn.tokens), count=count
    )


async def _opening(requests: AsyncIterator[Any]) -> rounds_pb2.Open:
    with suppress(DecodeError):
        async for request in requests:
            if request.WhichOneof("request") == "open":
                opening: rounds_pb2.Open = request.open
                return opening
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


def _ahead(ahead: AheadOutcome) -> rounds_pb2.AheadOutcome:
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
