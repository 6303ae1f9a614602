"""What makes a Draft, seen from the gateway. Adding a drafter is adding a class and a line to DRAFTERS."""

import asyncio
import logging
from typing import Protocol

from decoding.ngram import NgramIndex
from gateway.errors import (
    GatewayError,
    InvalidRequestError,
    SequenceFailedError,
    SequenceLostError,
    WorkerLostError,
)
from gateway.fleet import DraftStream, Fleet
from gateway.sequence import Sequence
from protos import rounds_pb2
from protos.convert import draft_to_message

logger = logging.getLogger("ray.serve")

REFUSALS = (WorkerLostError, InvalidRequestError, SequenceFailedError)
MOST_LOSSES = 3  # of draft workers with one sequence, without a Draft in between
SMALL_LAG = 32  # tokens that a draft worker may be behind when it is asked again
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0  # without drafts, from a second failure in a row on, doubled


class Drafter(Protocol):
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

    def __init__(self, fleet: Fleet, sequence: Sequence) -> None:
        self._fleet = fleet
        self._sequence = sequence
        self._stream: DraftStream | None = None
        self._asked = 0  # number of the newest Propose: there may be several to one turn of the target
        self._pause_s = 0.0
        self._losses = 0  # of workers that had the sequence, without a Draft in between

    async def start(self) -> None:
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
            return await self._stream.receive(self._asked, timeout)
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

    def __init__(self, fleet: Fleet, sequence: Sequence) -> None:
        self._sequence = sequence
        self._index = NgramIndex()
        self._known = 0

    async def start(self) -> None:
        self._index.append(self._sequence.since(self._known))
        self._known = len(self._sequence)

    async def propose(
        self, depth: int, patience_s: float, leaves: int = 0, traceparent: str = ""
    ) -> rounds_pb2.DraftReply | None:
        await self.start()
        return rounds_pb2.DraftReply(draft=draft_to_message(self._index.propose(depth)))

    async def ahead(self) -> rounds_pb2.Draft | None:
        """Nothing is prepared: looking up takes no time."""
        return None

    async def recover(self) -> None:
        """Nothing to wait for."""

    async def aclose(self) -> None:
        """Nothing is held."""


DRAFTERS: dict[str, type[Drafter]] = {"model": ModelDrafter, "ngram": NgramDrafter}
