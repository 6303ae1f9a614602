"""Messages between a gateway and a worker: requests to work for the engine, its answers to replies."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from actors.messages import Answer
from outrider.decoding.settings import TokenLogprobs
from outrider.engine.work import (
    NOTHING_FORCED,
    AheadOutcome,
    Extend,
    Forced,
    Generate,
    Generated,
    Prepared,
    Propose,
    Proposed,
    Score,
    Scored,
    Timings,
    TopUp,
    Verified,
    Verify,
    Work,
)
from protos import generation_pb2, rounds_pb2
from protos.conversions import draft_from_message, draft_to_message, step_to_message

RequestT = TypeVar("RequestT", rounds_pb2.DraftRequest, rounds_pb2.TargetRequest)
ReplyT = TypeVar("ReplyT", rounds_pb2.DraftReply, rounds_pb2.TargetReply)


class Translation(ABC, Generic[RequestT, ReplyT]):
    """Of one kind of worker."""

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


class DraftTranslation(Translation[rounds_pb2.DraftRequest, rounds_pb2.DraftReply]):
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


class TargetTranslation(Translation[rounds_pb2.TargetRequest, rounds_pb2.TargetReply]):
    @staticmethod
    def work(sequence: int, request: rounds_pb2.TargetRequest) -> tuple[rounds_pb2.Turn, Work]:
        match request.WhichOneof("request"):
            case "verify":
                return request.verify.turn, _verify(sequence, request.verify)
            case "extend":
                return request.extend.turn, _extend(sequence, request.extend)
            case "plain":
                return request.plain.turn, _generate(sequence, request.plain)
            case "top_up":
                return request.top_up.turn, _top_up(sequence, request.top_up)
            case "score":
                return request.score.turn, _score(sequence, request.score)
        raise ValueError("after Open a target worker takes Verify, Extend, Plain, TopUp, Score and Close")

    @staticmethod
    def reply(answer: Answer) -> rounds_pb2.TargetReply:
        result, draft, draft_step, finish, forced = answer.result, None, None, None, NOTHING_FORCED
        rank, continues = None, False
        if isinstance(result, Verified):
            accepted, tokens = result.verdict.accepted, result.verdict.tokens
            draft = None if result.draft is None else draft_to_message(result.draft)
            forced, finish = result.forced, result.finish
            rank, continues = result.rank, result.continues
            draft_step = None if result.draft_step is None else step_to_message(result.draft_step)
        elif isinstance(result, Scored):
            accepted, tokens = (), ()
        else:
            assert isinstance(result, Generated)
            accepted, tokens, finish = (), (*result.forced, result.token), result.finish
            forced = Forced(len(result.forced))
        return rounds_pb2.TargetReply(
            round=answer.round,
            accepted=accepted,
            tokens=tokens,
            logprobs=[_logprobs(position) for position in result.logprobs],
            finish_reason=finish,
            draft=draft,
            draft_step=draft_step,
            rank=rank,
            continues=continues,
            timings=_timings(result.timings),
            load=_load(answer),
            forced=forced.tokens,
            forced_nodes=forced.nodes,
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
        until=message.until,
    )


def _extend(sequence: int, message: rounds_pb2.Extend) -> Extend:
    turn, draft = message.turn, draft_from_message(message.draft)
    return Extend(sequence=sequence, base=turn.base, tokens=tuple(turn.tokens), draft=draft, round=turn.round)


def _generate(sequence: int, message: rounds_pb2.Plain) -> Generate:
    turn = message.turn
    count = message.until - turn.base - len(turn.tokens)
    return Generate(sequence=sequence, base=turn.base, tokens=tuple(turn.tokens), count=count)


def _top_up(sequence: int, message: rounds_pb2.TopUp) -> TopUp:
    turn = message.turn
    return TopUp(
        sequence=sequence,
        base=turn.base,
        tokens=tuple(turn.tokens),
        count=message.until - turn.base - len(turn.tokens),
        next_depth=message.next_depth,
        next_leaves=message.next_leaves,
    )


def _score(sequence: int, message: rounds_pb2.Score) -> Score:
    turn = message.turn
    return Score(sequence=sequence, base=turn.base, tokens=tuple(turn.tokens), start=message.start)


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
        no_drafts_because=load.no_drafts_because,
    )
