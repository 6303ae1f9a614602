"""Streams to a worker by someone who has the deployment's token: what a gateway sends, and worse."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from gateway.workers.streams import Role
from protos import generation_pb2, rounds_pb2
from protos.trust import TOKEN
from tests.fuzz.bodies import TOKEN_IDS
from tests.fuzz.messages import descriptor_of, field_of, leaves, message_of
from tests.fuzz.values import graded
from tests.support.service import Service
from tests.support.trust import TRUST

REQUESTS: dict[Role, type[Message]] = {
    "target": rounds_pb2.TargetWorkerRequest,
    "draft": rounds_pb2.DraftWorkerRequest,
}
TOGETHER: dict[Role, Any] = {
    "target": rounds_pb2.TargetWorkerRequests,
    "draft": rounds_pb2.DraftWorkerRequests,
}
REPLIES: dict[Role, Any] = {"target": rounds_pb2.TargetReplies, "draft": rounds_pb2.DraftReplies}
METHODS: dict[Role, str] = {
    "target": "/outrider.rounds.v1.TargetWorker/Stream",
    "draft": "/outrider.rounds.v1.DraftWorker/Stream",
}
ENDS = (  # the only ways in which a worker ends a stream
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
)
REFUSALS = (
    rounds_pb2.SequenceEnded.INVALID,
    rounds_pb2.SequenceEnded.TOO_LARGE,
    rounds_pb2.SequenceEnded.GRAMMAR,
    rounds_pb2.SequenceEnded.ADAPTER,
)
LEFT = "left"  # the sender left before the worker's last reply
CROSSED = "Internal error from Core"  # error of gRPC's own client if a refusal crosses a message
PATIENCE_S = 0.1  # for a reply: none may come, for what is void gets none
ENDINGS = ["half-close", "half-close", "half-close", "cancel", "abandon"]
NAMES = ("sequence", "epoch")  # fields of every message
Fields = dict[str, Any]


@dataclass(frozen=True)
class Session:
    """Messages of one stream, sent without reading the replies."""

    role: Role
    messages: Sequence[Fields | bytes]  # requests; bytes go as they are
    waits: Sequence[int]  # the messages of the stream after which a reply is awaited
    ending: str
    together: int = 1  # requests that travel in one message
    token: str = TRUST.token

    async def run(self, service: Service) -> str:
        """Raises AssertionError if the worker answers with anything but replies and a clear refusal."""
        async with TRUST.connect(service.of(self.role)[0].address, ()) as channel:
            stub: Any = channel.stream_stream(METHODS[self.role], None, REPLIES[self.role].FromString)
            call = stub(metadata=((TOKEN, self.token),))
            replies: asyncio.Queue[Any] = asyncio.Queue()
            refused: list[rounds_pb2.SequenceEnded] = []
            reading = asyncio.create_task(_read(call, replies, refused))
            await self._write(call, replies)
            if self.ending == "half-close" and not call.done():
                await call.done_writing()
            if self.ending == "cancel":
                call.cancel()
            if self.ending == "abandon":
                await channel.close(None)
            await reading
            code, details = await call.code(), await call.details()
        if details == CROSSED:
            return LEFT
        if code is grpc.StatusCode.CANCELLED and self.ending in ("cancel", "abandon"):
            return LEFT
        assert code in ENDS, f"{code.name}: {details}"
        assert details or code is grpc.StatusCode.OK, code
        for end in refused:
            assert end.cause in REFUSALS, end
            assert end.details, end
            return rounds_pb2.SequenceEnded.Cause.Name(end.cause)
        return str(code.name)

    async def _write(self, call: Any, replies: "asyncio.Queue[Any]") -> None:
        for index, raw in enumerate(self._raw()):
            try:
                await call.write(raw)
            except (grpc.RpcError, asyncio.InvalidStateError):
                return  # refused by now
            if index in self.waits:
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        await replies.get()
                except TimeoutError:
                    continue

    def _raw(self) -> Iterator[bytes]:
        """The messages of the stream."""
        gathered: list[Message] = []
        for message in self.messages:
            if isinstance(message, bytes):
                yield message
                continue
            gathered.append(REQUESTS[self.role](**message))
            if len(gathered) == self.together:
                yield TOGETHER[self.role](requests=gathered).SerializeToString()
                gathered = []
        if gathered:
            yield TOGETHER[self.role](requests=gathered).SerializeToString()


async def _read(call: Any, replies: "asyncio.Queue[Any]", refused: list[rounds_pb2.SequenceEnded]) -> None:
    try:
        async for told in call:
            refused += told.ended
            replies.put_nowait(told)
    except (grpc.RpcError, asyncio.CancelledError):
        pass  # the code tells
    replies.put_nowait(None)


@st.composite
def sessions(draw: DrawFn) -> Session:
    """Streams with up to three faults."""
    role: Role = draw(st.sampled_from(["target", "draft"]))
    messages: list[Fields | bytes] = [*draw(_conversation(role))]
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 3]))):
        fault = draw(st.sampled_from([_odd_field, _odd_field, _odd_field, _odd_order, _odd_message]))
        messages = draw(fault(role, messages))
    waits = draw(st.sets(st.integers(0, len(messages)), max_size=4))
    token = draw(st.sampled_from([TRUST.token] * 30 + ["", "another token of this"]))
    together = draw(st.sampled_from([1, 1, 2, 9]))
    return Session(role, messages, sorted(waits), draw(st.sampled_from(ENDINGS)), together, token)


@st.composite
def _conversation(draw: DrawFn, role: Role) -> list[Fields]:
    """What a gateway might send."""
    prompt = draw(st.lists(TOKEN_IDS, min_size=1, max_size=20))
    sampling = draw(
        graded(message_of(descriptor_of(generation_pb2.Sampling)), ordinary=8, extreme=1, malformed=1)
    )
    names = {"sequence": draw(st.integers(1, 3)), "epoch": draw(st.integers(1, 3))}
    opening = {"prompt_length": len(prompt), "noise_key": draw(st.integers(0, 2**64 - 1))}
    messages: list[Fields] = [{**names, "open": {**opening, "sampling": sampling}}]
    known, tokens, round_number = 0, prompt, 1
    for _ in range(draw(st.integers(0, 4))):
        turn = {"round": round_number, "base": known, "tokens": tokens}
        length = known + len(tokens)
        asked = _propose(turn)
        if role == "target":
            asked = _verify(turn, sampling) | _plain(turn, length) | _score(turn, length)
            asked |= st.just({"audit": {"turn": turn}})
        messages.append({**names, **draw(asked)})
        known = draw(st.integers(max(len(prompt), length - 3), length))
        tokens = draw(st.lists(TOKEN_IDS, max_size=3))
        round_number += draw(st.sampled_from([1, 1, 1, 0]))
    return [*messages, {**names, "close": {}}] if draw(st.booleans()) else messages


def _propose(turn: Fields) -> SearchStrategy[Fields]:
    return st.builds(
        lambda depth, alternatives: {"propose": {"turn": turn, "depth": depth, "alternatives": alternatives}},
        st.integers(0, 6),
        st.integers(0, 4),
    )


def _plain(turn: Fields, length: int) -> SearchStrategy[Fields]:
    return st.builds(
        lambda count: {"decode": {"turn": turn, "lease": {"until": length + count}}},
        st.integers(1, 6),
    )


def _score(turn: Fields, length: int) -> SearchStrategy[Fields]:
    return st.builds(lambda start: {"score": {"turn": turn, "start": start}}, st.integers(0, length))


def _verify(turn: Fields, sampling: Mapping[str, Any]) -> SearchStrategy[Fields]:
    is_coupled = (sampling.get("verification") or "coupled") == "coupled"
    return st.builds(
        lambda draft: {"decode": {"turn": turn, "draft": draft}},
        trees() if is_coupled else sampled_chains(),
    )


@st.composite
def trees(draw: DrawFn) -> Fields:
    tokens = draw(st.lists(TOKEN_IDS, max_size=6, unique=True))
    return {"tokens": tokens, "parents": [draw(st.integers(-1, node - 1)) for node in range(len(tokens))]}


@st.composite
def sampled_chains(draw: DrawFn) -> Fields:
    tokens = draw(st.lists(TOKEN_IDS, max_size=4))
    likely = draw(st.sampled_from([1.0, 0.5, 1e-30, 0.0, -1.0, 7.0, float("nan"), float("inf")]))
    probs = [{"token_ids": [token, token ^ 1], "probs": [likely, 1.0 - likely]} for token in tokens]
    return {"tokens": tokens, "parents": [*range(-1, len(tokens) - 1)], "draft_probs": probs}


@st.composite
def _odd_field(draw: DrawFn, role: Role, messages: list[Fields | bytes]) -> list[Fields | bytes]:
    """One field of one message holds anything that its type can hold."""
    descriptor = descriptor_of(REQUESTS[role])
    kind = draw(st.sampled_from([field.name for field in descriptor.fields]))
    path = draw(st.sampled_from([path for path in leaves(descriptor) if path[0] == kind]))
    whole = deepcopy(messages)
    places = [place for place, message in enumerate(whole) if isinstance(message, dict) and kind in message]
    if not places:
        places = [len(whole)]
        whole.append({kind: {}} if len(path) > 1 else {})
    if len(path) > 1 or kind in NAMES:
        place = draw(st.sampled_from(places))
        _put(whole[place], [*_fields(descriptor, path)], draw)
    return whole


def _fields(descriptor: Descriptor, path: Sequence[str]) -> list[FieldDescriptor]:
    found: list[FieldDescriptor] = []
    inside: Descriptor | None = descriptor
    for name in path:
        assert inside is not None
        found.append(inside.fields_by_name[name])
        inside = found[-1].message_type
    return found


def _put(message: Any, path: list[FieldDescriptor], draw: DrawFn) -> None:
    """A drawn value at the end of the path; in a list of messages into one of them."""
    *above, last = path
    for field in above:
        if message.get(field.name) is None:
            message[field.name] = [] if field.is_repeated else {}
        message = message[field.name]
        if field.is_repeated:
            if not message:
                message.append({})
            message = message[draw(st.integers(0, len(message) - 1))]
    levels = field_of(last)
    message[last.name] = draw(levels.extreme | levels.malformed)


@st.composite
def _odd_order(draw: DrawFn, role: Role, messages: list[Fields | bytes]) -> list[Fields | bytes]:
    """A message is missing, comes twice, or comes at another place."""
    if not messages:
        return messages
    place = draw(st.integers(0, len(messages) - 1))
    message = messages[place]
    rest = [*messages[:place], *messages[place + 1 :]]
    copies = draw(st.integers(0, 2))
    for _ in range(copies):
        there = draw(st.integers(0, len(rest)))
        rest = [*rest[:there], message, *rest[there:]]
    return rest


@st.composite
def _odd_message(draw: DrawFn, role: Role, messages: list[Fields | bytes]) -> list[Fields | bytes]:
    """A message that no sender would send at this place, or bytes that are no message."""
    message = message_of(descriptor_of(REQUESTS[role]))
    odd: Fields | bytes = draw(st.binary(max_size=12) | message.ordinary | message.extreme | st.just({}))
    place = draw(st.integers(0, len(messages)))
    return [*messages[:place], odd, *messages[place:]]
