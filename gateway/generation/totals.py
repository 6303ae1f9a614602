"""Counters of this gateway since its start, and the depths in force: for metrics and GetLoads."""

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gateway.generation.request import Prepared
from gateway.loop.loop import SequenceLoop
from gateway.loop.stats import Stats
from gateway.settings import Speculation

MAX_TASKS = 64  # labels come from clients; further labels count as OTHER
OTHER, UNLABELLED, NO_DRAFTER = "other", "none", "none"
MAX_KEPT = 2**14  # answered requests that were not published yet
CANCELLED = "cancelled"  # error of a request whose reader has disconnected
LEFT = (asyncio.CancelledError, GeneratorExit)  # exceptions that a disconnected reader raises in the answer


@dataclass
class Timing:
    """Times of a request in seconds from its arrival; None: not reached."""

    operation: str  # "text_completion" or "chat"
    arrived: float  # time.monotonic()
    queue_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None
    tokens: int = 0
    error: str | None = None  # class of the exception that ended it, or CANCELLED
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that were in the target's KV cache before
    ends: Counter[str] = field(default_factory=Counter)  # answers by finish reason, or abort or error

    def admitted(self, prepared: Prepared) -> None:
        """Records the time in the queue, which is also sent to targets."""
        self.queue_s = time.monotonic() - self.arrived
        for sequence in prepared.sequences:
            sequence.queued_s = self.queue_s

    def add(self, tokens: int) -> None:
        if self.first_token_s is None and tokens:
            self.first_token_s = time.monotonic() - self.arrived
        self.tokens += tokens

    def note_ends(self, prepared: Prepared) -> None:
        """Records what is known of the request's sequences once it has ended."""
        self.prompt_tokens, self.cached_tokens = prepared.prompt_tokens, prepared.cached_tokens
        unfinished = "abort" if self.error == CANCELLED else "error"
        self.ends.update(sequence.finish_reason or unfinished for sequence in prepared.sequences)

    def end(self) -> None:
        """Records the end, once the last token is there. The time to read its chunk does not count."""
        if self.total_s is None:
            self.total_s = time.monotonic() - self.arrived

    @property
    def per_output_token_s(self) -> float | None:
        """Mean seconds per token after the first; None: unknown."""
        if self.error is not None or self.tokens < 2 or self.first_token_s is None or self.total_s is None:
            return None
        return (self.total_s - self.first_token_s) / (self.tokens - 1)


@dataclass(frozen=True)
class StatsKey:
    """Key of the counters: labels on which acceptance depends."""

    task: str
    drafter: str


@dataclass(frozen=True)
class InForce:
    """Running sequences whose depth has the same reason: their number and mean depth."""

    sequences: int
    mean_depth: float  # tokens


class Totals:
    """Counters of sequences and requests, while they run and after they have ended."""

    def __init__(self) -> None:
        self._ended: dict[StatsKey, Stats] = {}
        self._under_way: dict[SequenceLoop, StatsKey] = {}
        self._tasks: set[str] = set()
        self.gateway = secrets.token_hex(4)  # unique name of this gateway
        self.began = time.monotonic()
        self.answered: deque[Timing] = deque(maxlen=MAX_KEPT)  # requests to be published

    @contextmanager
    def timing(self, operation: str, prepared: Prepared) -> Iterator[Timing]:
        """Measures a request from its arrival to its end, and keeps its times."""
        timing = Timing(operation, time.monotonic())
        try:
            yield timing
        except BaseException as error:
            if timing.total_s is None:
                timing.error = CANCELLED if isinstance(error, LEFT) else type(error).__name__
            raise
        finally:
            timing.end()
            timing.note_ends(prepared)
            self.answered.append(timing)

    @contextmanager
    def counting(self, loop: SequenceLoop, task: str | None, speculation: Speculation) -> Iterator[None]:
        """Counts a sequence while it is generated, and keeps its counters after that."""
        drafter = NO_DRAFTER if speculation.mode == "off" else speculation.drafter or NO_DRAFTER
        kind = StatsKey(self.label(task), drafter)
        self._under_way[loop] = kind
        try:
            yield
        finally:
            del self._under_way[loop]
            self._ended.setdefault(kind, Stats()).add(loop.stats)

    def stats(self) -> dict[StatsKey, Stats]:
        """Returns the counters since the start, running sequences included."""
        by_kind: dict[StatsKey, Stats] = {}
        for kind, stats in [
            *self._ended.items(),
            *((kind, loop.stats) for loop, kind in self._under_way.items()),
        ]:
            by_kind.setdefault(kind, Stats()).add(stats)
        return by_kind

    def in_force(self) -> dict[str, InForce]:
        """Returns the depths in force by DepthReason."""
        sequences, depths = Counter[str](), Counter[str]()
        for loop in self._under_way:
            depth, reason = loop.depth()
            sequences[reason] += 1
            depths[reason] += depth
        return {reason: InForce(count, depths[reason] / count) for reason, count in sequences.items()}

    def label(self, task: str | None) -> str:
        """Returns the label under which the task is counted."""
        if task is None:
            return UNLABELLED
        if len(self._tasks) < MAX_TASKS:
            self._tasks.add(task)
        return task if task in self._tasks else OTHER
