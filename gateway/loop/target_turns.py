"""Turns of one sequence at one target: sends requests, receives replies, commits tokens."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.drafters.received import received_draft
from gateway.errors import DeadlineError
from gateway.events import VerdictReceived
from gateway.loop.answer_trace import NoTrace
from gateway.loop.watched_target import WatchedTarget
from gateway.sequence import GatewaySequence, Origin, Token, VerdictDraft
from gateway.workers.fleet import TargetStream
from outrider.decoding.draft import Draft
from outrider.decoding.lease import Lease
from protos import rounds_pb2
from protos.conversions import draft_to_message, lease_to_message, step_from_message
from protos.generation_pb2 import TokenLogprobs

NO_DRAFT = Draft()


@dataclass(frozen=True)
class Committed:
    """Tokens or prompt scores that one reply brought. The last reply has a finish_reason."""

    tokens: tuple[Token, ...]
    finish_reason: str | None  # "stop" or "length"
    round: VerdictReceived | None = None  # None: plain decoding
    scores: tuple[TokenLogprobs, ...] = ()  # log-probabilities of the prompt; they come before any token


class TargetTurns:
    """Sends turns and commits their replies. At most one turn per round is unanswered."""

    def __init__(
        self,
        stream: TargetStream,
        watched: WatchedTarget,
        sequence: GatewaySequence,
        trace: NoTrace,
        deadline: float,
        vocab_size: Callable[[], int],
    ) -> None:
        """
        Args:
            watched: receives the replies of the stream.
            deadline: when to give the request up, in the event loop's time.
            vocab_size: returns the number of token ids that all workers know.
        """
        self._stream = stream
        self._watched = watched
        self._sequence = sequence
        self._trace = trace
        self._deadline = deadline
        self._vocab_size = vocab_size

    def score(self, start: int) -> None:
        """Requests the log-probabilities of the prompt's tokens from position ``start`` on."""
        score = rounds_pb2.Score(turn=self._turn(self._trace.request), start=start)
        self._stream.send(rounds_pb2.TargetWorkerRequest(score=score))

    def decode(self, traceparent: str, draft: Draft = NO_DRAFT, lease: Lease | None = None) -> None:
        """Lets the target decode from the committed tokens on, or changes the current turn.

        Args:
            traceparent: span that waits for the reply.
            draft: Draft to be judged; in the current turn a larger Draft that begins with the Draft sent
                first.
            lease: how far the target may decode by itself; None: unchanged in the current turn, else not at
                all.
        """
        decode = rounds_pb2.Decode(
            turn=self._turn(traceparent),
            draft=draft_to_message(draft) if draft else None,
            lease=None if lease is None else lease_to_message(lease),
        )
        self._stream.send(rounds_pb2.TargetWorkerRequest(decode=decode))

    def _turn(self, traceparent: str) -> rounds_pb2.Turn:
        return self._stream.turn(self._sequence.round, traceparent)

    async def reply(self, plain_round: int | None = None) -> tuple[rounds_pb2.TargetReply, float]:
        """Returns the next reply to the newest turn, and the seconds of the wait.

        plain_round: round of the plain decoding before, whose last replies may still arrive.

        Raises:
            DeadlineError: the request's deadline passed first.
            GatewayError: the stream ended; see ``WorkerStream.receive``.
            MovedError: the sequence continues at a second target.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        timeout_s = max(self._deadline - started, 0.0)
        reply = await self._watched.receive(self._sequence.round, timeout_s, plain_round)
        if reply is None:
            raise DeadlineError("the answer was not finished before the request's deadline")
        return reply, clock() - started

    def arrived(self) -> rounds_pb2.TargetReply | None:
        """Takes the next reply to the newest turn, if it has arrived and ``commit`` cannot refuse it."""
        reply = self._stream.arrived(self._sequence.round)
        if reply is None or reply.HasField("draft"):
            return None
        self._stream.take()
        return reply

    def commit_scores(self, reply: rounds_pb2.TargetReply) -> None:
        """Stores the log-probabilities of the prompt's tokens in a reply.

        Raises:
            WorkerLostError: the reply has tokens, or other scores than were requested.
        """
        sequence = self._sequence
        if reply.tokens or not 0 < len(reply.logprobs) <= sequence.unscored:
            raise self._stream.lost("its answer to a Score tells other than the prompt's tokens")
        sequence.scores += reply.logprobs

    def commit(self, reply: rounds_pb2.TargetReply, own: Origin) -> tuple[Token, ...]:
        """Appends a reply's tokens to the sequence. No other function does.

        own: origin of the last token, the target's own.

        Raises:
            WorkerLostError: targets would refuse the reply's Draft; nothing of the reply is committed.
        """
        draft, rule = None, self._sequence.sampling.verification
        try:
            if reply.HasField("draft"):
                step = step_from_message(reply.draft_step) if reply.HasField("draft_step") else None
                received = received_draft(reply.draft, rule, self._vocab_size())
                draft = VerdictDraft(received, reply.drafter, step, reply.is_draft_of_host)
        except ValueError as error:
            raise self._stream.lost(str(error)) from error
        of_grammar = set(reply.forced_nodes)
        origins = [Origin.FORCED if node in of_grammar else Origin.ACCEPTED for node in reply.accepted]
        origins += [Origin.FORCED] * reply.forced + [own]
        logprobs = reply.logprobs or [None] * len(reply.tokens)
        if not self._sequence.generated:  # a later target may also have cached tokens of the answer
            self._sequence.cached_tokens = reply.timings.cached_tokens
        self._sequence.generated.extend(reply.tokens)
        self._sequence.finish_reason = reply.finish_reason or None
        self._sequence.draft = draft
        return tuple(map(Token, reply.tokens, origins, logprobs))
