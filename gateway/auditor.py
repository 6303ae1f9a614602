"""Audits a share of the answers: another target recomputes them, so that a faulty device is found."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

from gateway.errors import GatewayError
from gateway.sequence import GatewaySequence
from gateway.settings import AuditSettings
from gateway.workers.fleet import Fleet
from outrider.receipts.receipt import Numerics
from outrider.receipts.verdict import judged, tolerance_of
from protos import rounds_pb2

logger = logging.getLogger(f"ray.serve.{__name__}")

WAITING = 64  # audits queued or running; further answers are skipped
LONGEST_S = 300.0  # seconds; timeout of an audit, which has a lower priority than all other work


@dataclass
class AuditCounts:
    """Counters since the gateway's start. Outcomes are same, near-ties, differs and skipped."""

    answers: Counter[str] = field(default_factory=Counter)  # answers by outcome
    tokens: int = 0
    near_ties: int = 0
    wrong: int = 0


class Auditor:
    """Samples answers at random, and audits one answer at a time."""

    def __init__(
        self, settings: AuditSettings, fleet: Fleet, draw: Callable[[], float] = random.random
    ) -> None:
        """draw: returns a number from 0 to 1; an answer is audited if the number is below the fraction."""
        self._settings = settings
        self._fleet = fleet
        self._draw = draw
        self._turn = asyncio.Semaphore(1)
        self._audits: set[asyncio.Task[None]] = set()
        self.counts = AuditCounts()

    def offer(self, sequence: GatewaySequence) -> None:
        """Queues a complete answer for an audit if it is sampled. Does not block."""
        if not (sequence.generated and sequence.is_coupled) or self._draw() >= self._settings.fraction:
            return
        if len(self._audits) >= WAITING:
            self.counts.answers["skipped"] += 1
            return
        audit = asyncio.get_running_loop().create_task(self._audit(sequence))
        self._audits.add(audit)
        audit.add_done_callback(self._audits.discard)

    def close(self) -> None:
        """Cancels the queued and the running audits."""
        for audit in self._audits:
            audit.cancel()

    async def _audit(self, sequence: GatewaySequence) -> None:
        async with self._turn:
            try:
                async with asyncio.timeout(LONGEST_S):
                    outcome = await self._outcome(sequence)
            except (GatewayError, TimeoutError) as error:
                logger.warning("an audit is given up: %s", error or f"it took {LONGEST_S:g} s")
                outcome = "skipped"
        self.counts.answers[outcome] += 1

    async def _outcome(self, sequence: GatewaySequence) -> str:
        """Returns the outcome of an audit. Raises GatewayError."""
        stream = self._fleet.open_audit(sequence)
        if stream is None:
            return "skipped"
        margins: list[float] = []
        with closing(stream):
            audit = rounds_pb2.Audit(turn=stream.turn(1))
            stream.send(rounds_pb2.TargetWorkerRequest(audit=audit))
            while len(margins) < len(sequence.generated):
                reply = await stream.receive(1)
                assert reply is not None  # no timeout was given
                margins += reply.margins
        numerics = Numerics.of(stream.worker.settings)
        verdict = judged(margins, sequence.sampling, tolerance_of(numerics))
        self.counts.tokens += verdict.tokens
        self.counts.near_ties += verdict.near_ties
        self.counts.wrong += verdict.wrong
        if verdict.differs:
            logger.error(
                "an audit finds another answer: %s; %d of %d tokens are wrong, model %s, served by %s,"
                " audited by %s: one of them computes wrong numbers",
                verdict.reason,
                verdict.wrong,
                verdict.tokens,
                stream.worker.model,
                ", ".join(sequence.served_by),
                stream.address,
            )
            return "differs"
        return "near-ties" if verdict.near_ties else "same"
