"""Worker drafters: models in draft workers, reached over gRPC."""

import logging

from gateway.drafters.drafter import SequenceDrafter
from gateway.drafters.received import received_draft
from gateway.drafters.trace_context import TRACEPARENT
from gateway.errors import (
    GenerationFailedError,
    InvalidRequestError,
    SequenceLostError,
    WorkerLostError,
)
from gateway.proposal import AheadReport, Proposal
from gateway.sequence import GatewaySequence
from gateway.workers.fleet import DraftStream, Fleet
from outrider.decoding.draft import Draft
from protos import rounds_pb2
from protos.conversions import step_from_message

logger = logging.getLogger(f"ray.serve.{__name__}")

REFUSALS = (WorkerLostError, InvalidRequestError, GenerationFailedError)


class WorkerDrafter(SequenceDrafter):
    """Opens a stream for its sequence at the first request, and another stream after a loss."""

    def __init__(self, fleet: Fleet, draft: str, sequence: GatewaySequence) -> None:
        """draft: name of the draft to ask."""
        self._fleet = fleet
        self._name = draft
        self._sequence = sequence
        self._stream: DraftStream | None = None
        self._is_isolated = False  # whether a worker was lost with the sequence
        self._vocab_size = 0  # number of token ids that all workers know
        self._asked = 0  # number of the newest Propose; there may be several in one turn of the target

    async def propose(self, depth: int, alternatives: int = 0) -> Proposal:
        """Sends a Propose, which replaces all earlier requests to the worker, and waits for the Draft."""
        if self._stream is None:
            self._vocab_size = self._fleet.vocab_size()
            self._stream = self._fleet.open_draft(self._name, self._sequence, is_isolated=self._is_isolated)
        stream, base = self._stream, len(self._sequence)
        self._asked += 1
        asked = self._asked
        propose = rounds_pb2.Propose(
            turn=stream.turn(asked, TRACEPARENT.get()), depth=depth, alternatives=alternatives
        )
        try:
            stream.send(rounds_pb2.DraftWorkerRequest(propose=propose))
        except REFUSALS as error:
            raise self._lost(stream, error) from error
        reply = await self._reply(stream, asked)
        draft = self._draft(stream, reply.proposed.draft)
        timings, ahead = reply.timings, _outcome(reply)

        async def following() -> Draft:
            return self._draft(stream, (await self._reply(stream, asked)).prepared.draft)

        return Proposal(
            draft,
            base,
            stream.address,
            step_from_message(timings.last_step) if timings.last_step.number else None,
            timings.step_ns / 1e9,
            timings.total_ns / 1e9,
            ahead,
            None if ahead is None else ahead.tokens > 0,
            following,
        )

    async def _reply(self, stream: DraftStream, asked: int) -> rounds_pb2.DraftReply:
        try:
            reply = await stream.receive(asked)
        except REFUSALS as error:
            raise self._lost(stream, error) from error
        assert reply is not None  # no timeout was given
        return reply

    def _draft(self, stream: DraftStream, message: rounds_pb2.Draft) -> Draft:
        try:
            return received_draft(message, self._sequence.sampling.verification, self._vocab_size)
        except ValueError as error:
            raise self._lost(stream, error) from error

    def _lost(self, stream: DraftStream, error: Exception) -> WorkerLostError:
        """Returns the error to raise, and closes the stream unless a newer stream has replaced it."""
        logger.debug("sequence %d lost %s: %s", self._sequence.number, stream.address, error)
        if stream is self._stream:
            self.close()
        had_it = isinstance(error, GenerationFailedError | SequenceLostError)
        self._is_isolated |= had_it
        return (SequenceLostError if had_it else WorkerLostError)(str(error))

    def close(self) -> None:
        """Closes the stream; the next request opens another stream."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def _outcome(reply: rounds_pb2.DraftReply) -> AheadReport | None:
    if not reply.proposed.HasField("ahead"):
        return None
    ahead = reply.proposed.ahead
    rank = ahead.rank if ahead.HasField("rank") else None
    return AheadReport(ahead.tokens, rank, ahead.saved_ns / 1e9, ahead.wasted_tokens)
