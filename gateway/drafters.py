"""What makes a Draft, seen from the gateway. Adding a drafter is adding a function and a line to DRAFTERS."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from decoding.ngram import NgramIndex
from gateway.fleet import DraftStream, Fleet
from gateway.sequence import Sequence
from gateway.settings import GatewaySettings
from protos import rounds_pb2
from protos.convert import draft_to_message

NO_DRAFT = rounds_pb2.Draft()


class Drafter(Protocol):
    async def propose(self, sequence: Sequence, depth: int) -> rounds_pb2.Draft | None:
        """A Draft of at most ``depth`` tokens after the committed ones; at depth 0 only takes note of them.

        None if it came too late. Raises WorkerLostError if there will be no more.
        """


class ModelDrafter:
    """A draft model in a worker of its own."""

    def __init__(self, stream: DraftStream, deadline_s: float) -> None:
        self._stream = stream
        self._deadline_s = deadline_s
        self._late_round: int | None = None

    async def propose(self, sequence: Sequence, depth: int) -> rounds_pb2.Draft | None:
        # While an answer is overdue another wait would only add to the delay.
        if self._late_round is not None and await self._stream.receive(self._late_round, timeout=0.0) is None:
            return None
        propose = rounds_pb2.Propose(turn=self._stream.turn(), depth=depth, width=1)
        await self._stream.send(rounds_pb2.DraftRequest(propose=propose))
        if depth == 0:
            return NO_DRAFT
        reply = await self._stream.receive(sequence.round, self._deadline_s)
        self._late_round = sequence.round if reply is None else None
        return None if reply is None else reply.draft


class NgramDrafter:
    """Looks the newest tokens up in the sequence itself: no worker and no hop."""

    def __init__(self) -> None:
        self._index = NgramIndex()
        self._known = 0

    async def propose(self, sequence: Sequence, depth: int) -> rounds_pb2.Draft | None:
        self._index.append(sequence.since(self._known))
        self._known = len(sequence)
        return draft_to_message(self._index.propose(depth)) if depth else NO_DRAFT


@asynccontextmanager
async def _model(fleet: Fleet, sequence: Sequence, settings: GatewaySettings) -> AsyncIterator[Drafter]:
    async with fleet.open_draft(sequence) as stream:
        yield ModelDrafter(stream, settings.draft_deadline_ms / 1e3)


@asynccontextmanager
async def _ngram(fleet: Fleet, sequence: Sequence, settings: GatewaySettings) -> AsyncIterator[Drafter]:
    yield NgramDrafter()


DRAFTERS: dict[str, Callable[[Fleet, Sequence, GatewaySettings], AbstractAsyncContextManager[Drafter]]] = {
    "model": _model,
    "ngram": _ngram,
}
