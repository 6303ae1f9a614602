"""Messages between a gateway and a worker: requests to work for the engine, its answers to replies."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from actors.messages import EngineAnswer
from outrider.decoding.settings import TokenLogprobs
from outrider.engine.work import (
    AheadOutcome,
    Audit,
    Audited,
    Decode,
    Decoded,
    EngineLoad,
    PreparedTree,
    Propose,
    Proposed,
    Score,
    Scored,
    Timings,
    Work,
)
from protos import generation_pb2, rounds_pb2
from protos.conversions import draft_from_message, draft_to_message, lease_from_message, step_to_message

RequestT = TypeVar("RequestT", rounds_pb2.DraftWorkerRequest, rounds_pb2.TargetWorkerRequest)
ValueT = TypeVar("ValueT")
MessageT = TypeVar("MessageT", bound=Message)
ReplyT = TypeVar("ReplyT", rounds_pb2.DraftReply, rounds_pb2.TargetReply)

FromFrontend = rounds_pb2.Opened | rounds_pb2.SequenceEnded | rounds_pb2.Leaving  # not from an engine

_FIELDS: dict[type[Message], str] = {
    rounds_pb2.Opened: "opened",
    rounds_pb2.SequenceEnded: "ended",
    rounds_pb2.Leaving: "leaving",
}


@dataclass(frozen=True)
class Translation(Generic[RequestT, ReplyT]):
    """Translation for one role of workers.

    ``work``: maps the number of a sequence at the engine and a request to the request's turn and its work.
    Raises ValueError if the request is malformed.

    ``reply``: maps a result of that work to a reply, in which the sequence is not named yet.
    """

    work: Callable[[int, RequestT], tuple[rounds_pb2.Turn, Work]]
    reply: Callable[[EngineAnswer], ReplyT]
    _replies: type[rounds_pb2.DraftReplies] | type[rounds_pb2.TargetReplies]

    def replies(self, messages: Iterable[FromFrontend | ReplyT]) -> Message:
        """Returns the message that carries all these messages."""
        fields: defaultdict[str, list[Any]] = defaultdict(list)
        for message in messages:
            fields[_FIELDS.get(type(message), "replies")].append(message)
        return self._replies(**fields)


def _work_of_draft(sequence: int, request: rounds_pb2.DraftWorkerRequest) -> tuple[rounds_pb2.Turn, Work]:
    if request.WhichOneof("request") != "propose":
        raise ValueError("after Open a draft worker takes Propose and Close")
    propose, turn = request.propose, request.propose.turn
    return turn, Propose(
        sequence=sequence,
        base=turn.base,
        tokens=tuple(turn.tokens),
        depth=propose.depth,
        alternatives=propose.alternatives,
        round=turn.round,
    )


def _reply_of_draft(answer: EngineAnswer) -> rounds_pb2.DraftReply:
    result = answer.result
    assert isinstance(result, Proposed | PreparedTree)
    reply = rounds_pb2.DraftReply(
        round=answer.round, timings=_timings(result.timings), load=_load(answer.load)
    )
    draft = draft_to_message(result.draft)
    if isinstance(result, PreparedTree):
        reply.prepared.CopyFrom(rounds_pb2.PreparedTree(draft=draft))
    else:
        ahead = None if result.ahead is None else _ahead_outcome(result.ahead)
        reply.proposed.CopyFrom(rounds_pb2.Proposed(draft=draft, ahead=ahead))
    return reply


def _work_of_target(sequence: int, request: rounds_pb2.TargetWorkerRequest) -> tuple[rounds_pb2.Turn, Work]:
    match request.WhichOneof("request"):
        case "decode":
            return request.decode.turn, _decode(sequence, request.decode)
        case "score":
            turn, start = request.score.turn, request.score.start
            return turn, Score(sequence=sequence, base=turn.base, tokens=tuple(turn.tokens), start=start)
        case "audit":
            turn = request.audit.turn
            return turn, Audit(sequence=sequence, base=turn.base, tokens=tuple(turn.tokens))
    raise ValueError("after Open a target worker takes Decode, Score, Audit and Close")


def _reply_of_target(answer: EngineAnswer) -> rounds_pb2.TargetReply:
    result = answer.result
    assert isinstance(result, Decoded | Scored | Audited)
    shared: dict[str, Any] = {
        "round": answer.round,
        "timings": _timings(result.timings),
        "load": _load(answer.load),
    }
    if isinstance(result, Audited):
        return rounds_pb2.TargetReply(margins=result.margins, **shared)
    shared["logprobs"] = [_logprobs(position) for position in result.logprobs]
    if isinstance(result, Scored):
        return rounds_pb2.TargetReply(**shared)
    return rounds_pb2.TargetReply(
        accepted=result.verdict.accepted,
        tokens=result.verdict.tokens,
        finish_reason=result.finish,
        draft=None if result.draft is None else draft_to_message(result.draft),
        drafter=result.drafter,
        draft_step=None if result.draft_step is None else _step(result.draft_step),
        is_draft_of_host=result.is_draft_of_host,
        rank=result.rank,
        continues=result.continues,
        forced=result.forced.tokens,
        forced_nodes=result.forced.nodes,
        **shared,
    )


def _decode(sequence: int, message: rounds_pb2.Decode) -> Decode:
    turn = message.turn
    return Decode(
        sequence=sequence,
        base=turn.base,
        tokens=tuple(turn.tokens),
        draft=draft_from_message(message.draft),
        round=turn.round,
        lease=lease_from_message(message.lease) if message.HasField("lease") else None,
    )


def _logprobs(position: TokenLogprobs) -> generation_pb2.TokenLogprobs:
    return generation_pb2.TokenLogprobs(
        logprob=position.chosen,
        token_ids=[token_id for token_id, _ in position.top],
        logprobs=[logprob for _, logprob in position.top],
    )


class _OfStep(Generic[ValueT, MessageT]):
    """Cached conversion to a message, for values that all results of a step share."""

    def __init__(self, make: Callable[[ValueT], MessageT]) -> None:
        self._make = make
        self._newest: tuple[ValueT, MessageT] | None = None

    def __call__(self, value: ValueT) -> MessageT:
        """Returns the message, which must not be modified."""
        if self._newest is None or self._newest[0] != value:
            self._newest = value, self._make(value)
        return self._newest[1]


def _load_to_message(load: EngineLoad) -> rounds_pb2.Load:
    return rounds_pb2.Load(
        decoding=load.decoding,
        running=load.running,
        waiting=load.waiting,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
        no_drafts_because=load.no_drafts_because,
    )


_load, _step = _OfStep(_load_to_message), _OfStep(step_to_message)


def _timings(timings: Timings) -> rounds_pb2.Timings:
    return rounds_pb2.Timings(
        queue_ns=int(timings.queue * 1e9),
        forward_ns=int(timings.forward * 1e9),
        step_ns=int(timings.step * 1e9),
        total_ns=int(timings.total * 1e9),
        last_step=_step(timings.last_step),
        cached_tokens=timings.adopted,
    )


def _ahead_outcome(ahead: AheadOutcome) -> rounds_pb2.AheadOutcome:
    return rounds_pb2.AheadOutcome(
        tokens=ahead.tokens,
        rank=ahead.rank,
        saved_ns=int(ahead.saved * 1e9),
        wasted_tokens=ahead.wasted,
    )


TRANSLATIONS: dict[str, Translation[Any, Any]] = {
    "draft": Translation(_work_of_draft, _reply_of_draft, rounds_pb2.DraftReplies),
    "target": Translation(_work_of_target, _reply_of_target, rounds_pb2.TargetReplies),
}
