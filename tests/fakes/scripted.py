"""A target and a draft without a model: the answer is written down beforehand, and every message is kept."""

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from gateway.workers.fleet import Fleet
from gateway.workers.streams import Role, WorkerInfo
from protos import generation_pb2, rounds_pb2, rounds_pb2_grpc
from protos.conversions import sampling_from_message
from protos.trust import Trust
from tests.fakes.conversations import Cause, EndedError, Requests, serve

TRUST = Trust(token="a token of this test")
VOCAB_SIZE = 256
MAX_LENGTH = 2048
PINGED = (("grpc.http2.min_ping_interval_without_data_ms", 500), ("grpc.keepalive_permit_without_calls", 1))


def kinds_of(requests: Iterable[Any]) -> list[str]:
    """Returns what each request asks for, see ``Script.kinds``; requests of several sequences may mix."""
    kinds: list[str] = []
    under_way: dict[tuple[int, int], int] = {}  # round by sequence and epoch
    for request in requests:
        kind = request.WhichOneof("request")
        name = request.sequence, request.epoch
        if kind == "decode":
            decode, before = request.decode, under_way.get(name)
            under_way[name] = decode.turn.round
            if decode.turn.round == before:
                kind = "ahead" if decode.draft.tokens else "renew"
            else:
                is_plain = decode.lease.until and not decode.lease.depth and not decode.draft.tokens
                kind = "plain" if is_plain else "verify"
        kinds.append(kind)
    return kinds


@dataclass
class Script:
    """What target and draft have in common: what they were told, and how they fail."""

    answer: Sequence[int]  # token ids after the prompt
    lost_at: Collection[int] = ()  # a sequence ends at these requests, counted over all sequences
    lost_with: Cause | None = None  # as this says, or else by the end of the whole stream
    slow_because: tuple[str, ...] = ()  # as it publishes
    requests: list[Any] = field(default_factory=list)  # in order, the opening first
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # no sequence is open any more

    @property
    def is_alone(self) -> bool:
        """No sequence is open; one may never have arrived before its client left."""
        return not self.requests or self.ended.is_set()

    async def turns(self, requests: Requests) -> AsyncIterator[tuple[Any, int]]:
        """Each request but Open and Close, with the number of generated tokens that it says are committed."""
        told: list[int] = []
        opening: Any = None
        async for request in requests:
            self.requests.append(request)
            kind = request.WhichOneof("request")
            if kind == "open":
                opening = request.open
            elif kind == "close":
                return
            else:
                turn = getattr(request, kind).turn
                assert turn.base <= len(told), f"base={turn.base}, told were {len(told)} tokens"
                told = told[: turn.base] + list(turn.tokens)
                if len(self.requests) in self.lost_at:
                    raise EndedError(self.lost_with, "lost by the script")
                yield request, len(told) - opening.prompt_length

    def kinds(self) -> list[str]:
        """What each request asks for; a Decode "plain" decoding, to "verify", or in the round under way: what
        is "ahead", or to "renew" the lease."""
        return kinds_of(self.requests)


@dataclass
class ScriptedTarget(Script, rounds_pb2_grpc.TargetWorkerServicer):
    """Says ``answer`` whatever is drafted. Takes chains only."""

    finish_reason: str = "length"  # reason at the answer's last token
    step_s: float = 0.0  # seconds of a token in plain decoding
    total_s: float = 0.0  # seconds that each answer reports
    verifying: asyncio.Event | None = None  # no Verdict on a Draft before it is set
    no_drafts_because: dict[str, str] = field(default_factory=dict)  # as each of its replies tells
    repeats_itself: bool = False  # sends each reply of an older round once more
    malformed_at: Collection[int] = ()  # with so many requests: its replies have this Draft
    runs_on: bool = False  # reads nothing while it decodes plainly
    said: int = 0  # tokens, over all sequences
    malformed: rounds_pb2.Draft = field(default_factory=lambda: rounds_pb2.Draft(tokens=[1], parents=[1]))
    refused_adapter: str = ""  # path of an adapter that it cannot load
    cached_tokens: int = 0  # tokens of each prompt, told with the first token
    adapters: list[bytes] = field(default_factory=list)  # digests of the adapters that it holds
    loading: asyncio.Event | None = None  # no adapter is loaded before it is set
    stalls_after: int = 0  # tokens of an answer, behind which it stalls until it is awake
    awake: asyncio.Event | None = None  # set once it stalls no more; None: it never stalls
    is_exact: bool = False  # as it publishes
    leaving: asyncio.Event | None = None  # it announces that it leaves once this is set; None: it stays
    asked_to_load: int = 0  # times
    margins: Sequence[float] = ()  # margins of an audited answer, told two at a time
    published: dict[str, Any] = field(default_factory=dict)  # further fields of what it publishes

    async def LoadAdapter(  # noqa: N802
        self, adapter: rounds_pb2.Adapter, context: Any
    ) -> rounds_pb2.Adapter:
        self.asked_to_load += 1
        if self.loading is not None:
            await self.loading.wait()
        if adapter.path == self.refused_adapter:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"adapters.{adapter.name}: refused")
        digest = adapter.path.encode()
        self.adapters.append(digest)
        return rounds_pb2.Adapter(name=adapter.name, path=adapter.path, digest=digest)

    async def DropAdapter(  # noqa: N802
        self, adapter: rounds_pb2.Adapter, context: Any
    ) -> rounds_pb2.AdapterDropped:
        self.adapters = [digest for digest in self.adapters if digest != adapter.digest]
        return rounds_pb2.AdapterDropped()

    async def Stream(self, requests: Any, context: Any) -> None:  # noqa: N802
        await serve(requests, context, rounds_pb2.TargetReplies, self._converse, self.leaving)

    async def _converse(self, requests: Requests) -> AsyncIterator[rounds_pb2.TargetReply]:
        said = 0  # tokens, as far as this sequence has come
        is_plain = False  # its newest new work was plain decoding
        previous = rounds_pb2.TargetReply(round=0, tokens=[7])
        try:
            async for request, generated in self.turns(requests):
                if self.repeats_itself:
                    yield previous
                kind, turn, drafted = self.kinds()[-1], request.decode.turn, request.decode.draft.tokens
                if kind == "verify":
                    await self._stall(generated)
                    if self.verifying is not None and drafted:
                        await self.verifying.wait()
                    stands = max(said, generated) if is_plain and self.is_coupled else generated
                    overtaken, is_plain = stands - generated, False
                    is_right = list(drafted[:overtaken]) == list(self.answer[generated:stands])
                    if stands < self.end:
                        previous = self._reply(turn, stands, drafted[overtaken:] if is_right else [])
                        said = stands + len(previous.tokens)
                        yield previous
                elif kind == "score":
                    for reply in self._scores(request.score):
                        yield reply
                elif kind == "audit":
                    for first in range(0, len(self.margins), 2):
                        margins = self.margins[first : first + 2]
                        yield rounds_pb2.TargetReply(round=request.audit.turn.round, margins=margins)
                elif kind == "ahead":
                    passed = said - generated  # tokens since the turn
                    if list(drafted[:passed]) == list(self.answer[generated:said]) and drafted[passed:]:
                        previous = self._reply(turn, said, drafted[passed:])
                        said += len(previous.tokens)
                        yield previous
                elif kind == "plain" or is_plain:
                    is_plain = True
                    said = generated if kind == "plain" else said
                    until = request.decode.lease.until - self.requests[0].open.prompt_length
                    for position in range(said, min(until, self.end)):
                        await asyncio.sleep(self.step_s)
                        await self._stall(position)
                        previous = self._reply(turn, position, [])
                        said = position + 1
                        yield previous
                        if requests.has_more and not self.runs_on:
                            break
        finally:
            self.ended.set()

    async def _stall(self, position: int) -> None:
        if self.awake is not None and position >= self.stalls_after:
            await self.awake.wait()

    def _reply(self, turn: Any, generated: int, drafted: Sequence[int]) -> rounds_pb2.TargetReply:
        ahead = self.answer[generated : self.end - 1]  # the last token is always said, never confirmed
        pairs = zip(drafted, ahead, strict=False)
        accepted = next((node for node, (guess, token) in enumerate(pairs) if guess != token), None)
        if accepted is None:
            accepted = min(len(drafted), len(ahead))
        end = generated + accepted + 1
        self.said += accepted + 1
        is_malformed = len(self.requests) in self.malformed_at
        return rounds_pb2.TargetReply(
            round=turn.round,
            accepted=range(accepted),
            tokens=self.answer[generated:end],
            finish_reason=self.finish_reason if end == self.end else None,
            timings=rounds_pb2.Timings(
                total_ns=int(self.total_s * 1e9), cached_tokens=0 if generated else self.cached_tokens
            ),
            load=rounds_pb2.Load(no_drafts_because=self.no_drafts_because),
            logprobs=[_logprobs(token) for token in self.answer[generated:end]] if self.asks_logprobs else [],
            draft=self.malformed if is_malformed else None,
        )

    def _scores(self, score: rounds_pb2.Score) -> Iterator[rounds_pb2.TargetReply]:
        """Scores of the prompt's tokens, two at a time."""
        told = [_logprobs(token) for token in [*score.turn.tokens][score.start :]]
        for first in range(0, len(told), 2):
            yield rounds_pb2.TargetReply(round=score.turn.round, logprobs=told[first : first + 2])

    @property
    def end(self) -> int:
        """Tokens that it says: all, or as many as are asked for."""
        sampling = sampling_from_message(self.requests[0].open.sampling)
        return min(len(self.answer), sampling.max_tokens)

    @property
    def is_coupled(self) -> bool:
        return sampling_from_message(self.requests[0].open.sampling).verification == "coupled"

    @property
    def asks_logprobs(self) -> bool:
        return bool(self.requests[0].open.sampling.HasField("logprobs"))


def _logprobs(token: int) -> generation_pb2.TokenLogprobs:
    """The token is the likelier of two."""
    return generation_pb2.TokenLogprobs(
        logprob=-0.25, token_ids=[token, token ^ 1], logprobs=[-0.25, -math.inf]
    )


@dataclass
class ScriptedDraft(Script, rounds_pb2_grpc.DraftWorkerServicer):
    """Guesses ``answer``, but for the positions in ``wrong``."""

    name: str = "model"
    wrong: Collection[int] = ()
    known: Collection[int] | None = None  # positions that it can draft; None: all
    prepares: bool = False  # sends a second reply, in which the Draft goes on
    gone_after: Collection[int] = ()  # a sequence ends after the reply to these requests, unasked
    silent: asyncio.Event | None = None  # no reply before it is set

    async def Stream(self, requests: Any, context: Any) -> None:  # noqa: N802
        await serve(requests, context, rounds_pb2.DraftReplies, self._converse)

    async def _converse(self, requests: Requests) -> AsyncIterator[rounds_pb2.DraftReply]:
        try:
            async for request, generated in self.turns(requests):
                if self.silent is not None:
                    await self.silent.wait()
                propose = request.propose
                draft = self._draft(generated, propose.depth)
                yield self._reply(propose.turn, proposed=rounds_pb2.Proposed(draft=draft))
                if self.prepares and propose.depth:
                    more = self._draft(generated, 2 * propose.depth)
                    yield self._reply(propose.turn, prepared=rounds_pb2.PreparedTree(draft=more))
                if len(self.requests) in self.gone_after:
                    raise EndedError(self.lost_with, "gone by the script")
        finally:
            self.ended.set()

    def _reply(self, turn: rounds_pb2.Turn, **reply: Any) -> rounds_pb2.DraftReply:
        return rounds_pb2.DraftReply(round=turn.round, **reply)

    def _draft(self, generated: int, depth: int) -> rounds_pb2.Draft:
        positions = range(generated, min(generated + depth, len(self.answer)))
        known = itertools.takewhile(lambda i: self.known is None or i in self.known, positions)
        tokens = [self.answer[i] ^ 1 if i in self.wrong else self.answer[i] for i in known]
        return rounds_pb2.Draft(
            tokens=tokens, parents=range(-1, len(tokens) - 1), draft_probs=self.probs(tokens)
        )

    def probs(self, tokens: Sequence[int]) -> list[rounds_pb2.SparseProbs]:
        """One for each token, where rejection sampling or block verification verifies."""
        if sampling_from_message(self.requests[0].open.sampling).verification == "coupled":
            return []
        return [rounds_pb2.SparseProbs(token_ids=[token], probs=[1.0]) for token in tokens]


@asynccontextmanager
async def fleet_of(*workers: ScriptedTarget | ScriptedDraft | None) -> AsyncIterator[Fleet]:
    """A Fleet that finds them on loopback, each behind a server of its own."""
    servers, found = [], []
    for worker in workers:
        if worker is None:
            continue
        server = grpc.aio.server(options=PINGED)
        role: Role = "target" if isinstance(worker, ScriptedTarget) else "draft"
        if isinstance(worker, ScriptedTarget):
            rounds_pb2_grpc.add_TargetWorkerServicer_to_server(worker, server)
        else:
            rounds_pb2_grpc.add_DraftWorkerServicer_to_server(worker, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
        found.append(
            WorkerInfo(
                role,
                f"a {role}",
                address,
                1,
                "node",
                VOCAB_SIZE,
                MAX_LENGTH,
                slow_because=worker.slow_because,
                draft=worker.name if isinstance(worker, ScriptedDraft) else "",
                is_exact=isinstance(worker, ScriptedTarget) and worker.is_exact,
                **(worker.published if isinstance(worker, ScriptedTarget) else {}),
            )
        )
    fleet = Fleet(lambda: found, TRUST)
    try:
        yield fleet
    finally:
        await fleet.close()
        for server in servers:
            await server.stop(grace=None)
