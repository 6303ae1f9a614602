"""Requests answered by workers whose gateway is this process, and the parts of a round's time."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from gateway.events import DraftAwaited, Drafted, Event, RoundBegan, TokenDecoded, VerdictReceived
from gateway.loop.answer_trace import NO_TRACE, NoTrace
from gateway.loop.factory import LoopFactory
from gateway.loop.loop import SequenceLoop
from gateway.loop.stats import Stats
from gateway.proposal import NO_PROPOSAL
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence
from gateway.settings import GatewaySettings, Speculation
from gateway.workers.fleet import Fleet
from gateway.workers.streams import WorkerInfo
from outrider.engine.offline.speculate import OfflineRequest
from outrider.pace.settings import PaceSettings
from protos import rounds_pb2
from tests.support.trust import TRUST

FAR_AHEAD_S = 3600.0
PARTS = ("gateway", "wire", "draft", "wait", "target")
PLAIN = Speculation(mode="off", drafter="model")
SETTINGS = GatewaySettings(model="m", tokenizer="t", propose_deadline_ms=1e6)

Parts = Callable[[float, float, float, float], dict[str, float]]


class RoundParts(NoTrace):
    """Listens to one answer in place of its trace, and notes the parts of the time between two Verdicts.

    target, draft: their steps, each from building the batch to token ids on the host, as the workers report
    them. wait: for such a step to begin. wire: what is left of the time from asking a worker to having its
    answer, the building and reading of the messages included. gateway: the rest. A round's parts add up to
    the time since the Verdict before it; the first Verdict, which takes the prompt in, has no round.
    """

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []  # seconds by part
        self._verdict_at: float | None = None
        self._sent_at = self._drafted_at = 0.0
        self._proposal = NO_PROPOSAL  # the newest

    def on(self, event: Event) -> None:
        now = time.perf_counter()
        match event:
            case Drafted():
                self._drafted_at, self._proposal = now, event.proposal
            case RoundBegan() | DraftAwaited():
                self._sent_at = now  # its Decode follows, unless it has to wait for a Draft
            case VerdictReceived(continued=False):
                self._verdict(now, event.reply.timings, self._asked)
            case VerdictReceived() | TokenDecoded():
                self._verdict(now, event.reply.timings, self._went_on)

    def _verdict(self, now: float, timings: rounds_pb2.Timings, parts: Parts) -> None:
        before, self._verdict_at = self._verdict_at, now
        if before is not None:
            self.rounds.append(parts(before, now, timings.step_ns / 1e9, timings.total_ns / 1e9))

    def _went_on(self, before: float, now: float, step_s: float, total_s: float) -> dict[str, float]:
        """Handles a Verdict under a lease: its step may have begun before the last Verdict came."""
        lasted = now - before
        target = min(step_s, lasted)
        wait = min(total_s, lasted) - target
        return {"gateway": 0.0, "wire": lasted - target - wait, "draft": 0.0, "wait": wait, "target": target}

    def _asked(self, before: float, now: float, step_s: float, total_s: float) -> dict[str, float]:
        parts = {"draft": 0.0, "wait": total_s - step_s, "target": step_s}
        parts["wire"] = now - self._sent_at - total_s
        parts["gateway"] = self._sent_at - before
        proposal = self._proposal
        if self._drafted_at - proposal.seconds > before:  # it was asked for in this round
            parts["gateway"] -= proposal.seconds
            parts["wire"] += proposal.overhead_s
            parts["wait"] += proposal.worker_s - proposal.step_s
            parts["draft"] = proposal.step_s
        return parts


def mean_round(runs: Sequence["AnswerRun"]) -> dict[str, float]:
    """Seconds of a round by part, mean over all of them."""
    rounds = [parts for run in runs for parts in run.rounds]
    return {part: fmean(parts[part] for parts in rounds) for part in PARTS}


@dataclass(frozen=True)
class AnswerRun:
    """Answer of one request, with its times."""

    total_s: float
    seconds: float  # seconds from the first Verdict on; prefill takes equally long in all modes
    generated: tuple[int, ...]
    stats: Stats
    rounds: list[dict[str, float]]  # as RoundParts has them

    @property
    def tokens(self) -> int:
        """Number of tokens that came in ``seconds``: all but the first."""
        return len(self.generated) - 1

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def rounds_of(
    fleet: Fleet, request: OfflineRequest, depth: int, trace: NoTrace = NO_TRACE
) -> tuple[GatewaySequence, SequenceLoop]:
    """Depth 0: plain decoding."""
    sequence = GatewaySequence(request.prompt, request.sampling, request.noise_key)
    speculation = Speculation(mode="fixed", depth=depth, drafter="model") if depth else PLAIN
    deadline = asyncio.get_running_loop().time() + FAR_AHEAD_S
    factory = LoopFactory(fleet, Paces(PaceSettings()), SETTINGS)
    return sequence, factory.of(sequence, speculation, deadline, trace=trace)


async def answer(workers: Sequence[WorkerInfo], request: OfflineRequest, depth: int) -> AnswerRun:
    """Answers a request through a gateway with its own connections."""
    fleet, times = Fleet(lambda: workers, TRUST), RoundParts()
    asked = time.perf_counter()
    sequence, rounds = rounds_of(fleet, request, depth, times)
    started = None
    async for _ in rounds.steps():
        started = time.perf_counter() if started is None else started
    assert started is not None
    ended = time.perf_counter()
    await fleet.close()
    return AnswerRun(ended - asked, ended - started, tuple(sequence.generated), rounds.stats, times.rounds)


async def answer_all(workers: Sequence[WorkerInfo], requests: Sequence[OfflineRequest], depth: int) -> float:
    """Tokens per second of all at once, from the moment when each has its first."""
    fleet = Fleet(lambda: workers, TRUST)
    started, tokens = time.perf_counter(), 0
    waiting = len(requests)

    async def one(request: OfflineRequest) -> None:
        nonlocal started, tokens, waiting
        sequence, rounds = rounds_of(fleet, request, depth)
        async for step in rounds.steps():
            tokens += len(step.tokens)
            if len(step.tokens) == len(sequence.generated):  # its first
                waiting -= 1
                if not waiting:
                    started, tokens = time.perf_counter(), 0

    await asyncio.gather(*(one(request) for request in requests))
    rate = tokens / (time.perf_counter() - started)
    await fleet.close()
    return rate
