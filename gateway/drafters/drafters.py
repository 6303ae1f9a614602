"""What makes a Draft, seen from the gateway. Adding a drafter is adding a class and a line to DRAFTERS."""

import asyncio
import logging
from typing import ClassVar, Protocol

from gateway.errors import (
    GatewayError,
    InvalidRequestError,
    SequenceFailedError,
    SequenceLostError,
    WorkerLostError,
)
from gateway.rounds.sequence import Sequence
from gateway.workers.fleet import DraftStream, Fleet
from outrider.decoding.draft import MAX_NODES, Draft, SparseProbs
from outrider.decoding.settings import Verification
from outrider.drafters.ngram import NgramIndex
from protos import rounds_pb2
from protos.conversions import chain_depth, draft_from_message, draft_to_message

logger = logging.getLogger("ray.serve")

REFUSALS = (WorkerLostError, InvalidRequestError, SequenceFailedError)
MOST_LOSSES = 3  # of draft workers with one sequence, without a Draft in between
SMALL_LAG = 32  # tokens that a draft worker may be behind when it is asked again
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0  # without drafts, from a second failure in a row on, doubled
NOTED_AT_A_TIME = 512  # tokens, about a millisecond: the event loop has others to serve


class Drafter(Protocol):
    asks_a_worker: ClassVar[bool]  # whether a Draft costs more than a look into the sequence

    def __init__(self, fleet: Fleet, sequence: Sequence) -> None: ...

    async def start(self) -> None:
        """Hands the committed tokens over and waits for nothing. Raises WorkerLostError."""

    async def propose(
        self, depth: int, patience_s: float, leaves: int = 0, traceparent: str = ""
    ) -> rounds_pb2.DraftReply | None:
        """A Draft that follows the committed tokens, None if it came too late.

        Raises WorkerLostError. After either, the next call is ``recover``.

        Args:
            depth: tokens of its chain, at most.
            leaves: runners-up beside the chain, at most.
            traceparent: of the span that waits for it, where that is recorded.
        """

    async def ahead(self) -> rounds_pb2.Draft | None:
        """The newest Draft and what follows its likely verdicts, once that is prepared; None: never.

        Cancelled by whoever proposes again. Raises WorkerLostError.
        """

    async def recover(self) -> None:
        """Returns once Drafts can be asked for again, however long that takes."""

    async def aclose(self) -> None: ...


class ModelDrafter:
    """A draft model in a worker of its own."""

    asks_a_worker: ClassVar[bool] = True

    def __init__(self, fleet: Fleet, sequence: Sequence) -> None:
        self._fleet = fleet
        self._sequence = sequence
        self._stream: DraftStream | None = None
        self._vocab_size = 0  # of the ids that all workers know
        self._asked = 0  # number of the newest Propose: there may be several to one turn of the target
        self._pause_s = 0.0
        self._losses = 0  # of workers that had the sequence, without a Draft in between

    async def start(self) -> None:
        self._vocab_size = self._fleet.vocab_size()
        self._stream = self._fleet.open_draft(self._sequence)
        await self._ask(0)

    async def propose(
        self, depth: int, patience_s: float, leaves: int = 0, traceparent: str = ""
    ) -> rounds_pb2.DraftReply | None:
        deadline = asyncio.get_running_loop().time() + patience_s
        await self._ask(depth, leaves, traceparent)
        reply = await self._reply(max(deadline - asyncio.get_running_loop().time(), 0.0))
        if reply is not None:
            self._pause_s, self._losses = 0.0, 0
        return reply

    async def ahead(self) -> rounds_pb2.Draft | None:
        reply = await self._reply()
        return None if reply is None else reply.draft

    async def recover(self) -> None:
        """At once after one failure; after more in a row with pauses that grow.

        Never where drafts were lost with the sequence again and again: it may be what ends them.
        """
        while True:
            if self._losses >= MOST_LOSSES:
                logger.error("%d draft workers were lost with a sequence: it goes on without", self._losses)
                await asyncio.Event().wait()
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(max(2 * self._pause_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
            try:
                if self._stream is None:
                    await self.start()
                await self._reply()  # the overdue Draft, or the end of the prefill
                while self._stream is not None and self._stream.lag > SMALL_LAG:
                    await self._ask(0)
                    await self._reply()
                return
            except WorkerLostError:
                continue

    async def _ask(self, depth: int, leaves: int = 0, traceparent: str = "") -> None:
        if self._stream is None:  # lost while nobody waited for a Draft
            raise WorkerLostError("the draft worker was lost")
        self._asked += 1
        turn = self._stream.turn(self._asked, traceparent)
        propose = rounds_pb2.Propose(turn=turn, depth=depth, leaves=leaves)
        try:
            await self._stream.send(rounds_pb2.DraftRequest(propose=propose))
        except REFUSALS as error:
            raise await self._lost(error) from error

    async def _reply(self, timeout: float | None = None) -> rounds_pb2.DraftReply | None:
        assert self._stream is not None
        try:
            reply = await self._stream.receive(self._asked, timeout)
            if reply is not None:
                _check(reply.draft, self._sequence.sampling.verification, self._vocab_size)
            return reply
        except REFUSALS as error:
            raise await self._lost(error) from error

    async def _lost(self, error: GatewayError) -> WorkerLostError:
        self._losses += isinstance(error, SequenceFailedError | SequenceLostError)
        await self.aclose()
        return WorkerLostError(str(error))

    async def aclose(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.aclose()


class NgramDrafter:
    """Looks the newest tokens up in the sequence itself: no worker and no hop, never late and never lost."""

    asks_a_worker: ClassVar[bool] = False

    def __init__(self, fleet: Fleet, sequence: Sequence) -> None:
        self._sequence = sequence
        self._index = NgramIndex()

    async def start(self) -> None:
        """A long prompt is taken note of in parts, between which others have their turn."""
        new = self._sequence.since(len(self._index))
        for begin in range(0, len(new), NOTED_AT_A_TIME):
            if begin:
                await asyncio.sleep(0)
            self._index.append(new[begin : begin + NOTED_AT_A_TIME])

    async def propose(
        self, depth: int, patience_s: float, leaves: int = 0, traceparent: str = ""
    ) -> rounds_pb2.DraftReply | None:
        await self.start()
        draft = self._index.propose(depth)
        if self._sequence.sampling.verification != "coupled":  # the ratio rules ask how likely each guess was
            draft = Draft.chain(draft.tokens, [SparseProbs((token,), (1.0,)) for token in draft.tokens])
        return rounds_pb2.DraftReply(draft=draft_to_message(draft))

    async def ahead(self) -> rounds_pb2.Draft | None:
        """Nothing is prepared: looking up takes no time."""
        return None

    async def recover(self) -> None:
        """Nothing to wait for."""

    async def aclose(self) -> None:
        """Nothing is held."""


DRAFTERS: dict[str, type[Drafter]] = {"model": ModelDrafter, "ngram": NgramDrafter}


def _check(draft: rounds_pb2.Draft, rule: Verification, vocab_size: int) -> None:
    """What the target would refuse ends drafting here, not the request there. To be quick: once a round.

    Args:
        vocab_size: of the ids that all workers know.

    Raises:
        WorkerLostError: the worker's Draft makes no sense; the message says why.
    """
    tokens, parents, probs = draft.tokens, draft.parents, draft.draft_probs
    if len(tokens) > MAX_NODES:
        raise WorkerLostError(
            f"the draft worker's Draft has {len(tokens)} nodes, at most {MAX_NODES} are taken"
        )
    if len(parents) != len(tokens) or any(not -1 <= parent < node for node, parent in enumerate(parents)):
        raise WorkerLostError("the draft worker's Draft is no tree")
    if len(set(zip(parents, tokens, strict=True))) < len(tokens):
        raise WorkerLostError("the draft worker's Draft has siblings with the same token")
    if max(tokens, default=0) >= vocab_size:
        raise WorkerLostError(f"the draft worker drafted token {max(tokens)}, not all workers know it")
    if rule == "coupled":
        if probs:
            raise WorkerLostError(
                f"the draft worker's Draft has draft_probs, which {rule!r} does not ask for"
            )
        return
    if len(probs) != len(tokens) or chain_depth(draft) < len(tokens):
        raise WorkerLostError(f"the draft worker's Draft is no chain with draft_probs, as {rule!r} needs it")
    try:
        for token, support in zip(tokens, draft_from_message(draft).draft_probs, strict=True):
            support.check(token, vocab_size)
    except ValueError as error:
        raise WorkerLostError(f"the draft worker's Draft makes no sense: {error}") from error
