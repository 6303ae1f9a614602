"""Workers without a model: steps take as long as a cost table says, drafts are right as often as it says.

With draft-ahead they do what the engine does, and verdicts are foreseen as often as is said. Everything else
is the service's own code: rounds, drafting, pace, and when the target waits for company.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.simulated_engine import Cost, SimulatedEngine, SimulatedStream, Work
from gateway.sequence import Sequence
from gateway.workers.fleet import Fleet
from gateway.workers.streams import Worker
from outrider.decoding.draft import Draft
from outrider.engine.scheduling.batch_delay import BatchDelay
from outrider.pace.cost_model import Step
from protos import rounds_pb2
from protos.conversions import draft_from_message, draft_to_message
from protos.trust import Trust

RIGHT, WRONG = 1, 0  # the target always says RIGHT; where a draft would say WRONG is drawn beforehand
MAX_LENGTH = 1 << 20


@dataclass(frozen=True)
class Ahead:
    """Draft-ahead. Which verdicts are foreseen is drawn, whatever the number of branches."""

    branches: int = 0  # verdicts, of all streams together, that a draft prepares for in idle time; 0: none
    foreseen_rate: float = 0.0  # share of verdicts


def right_path(draft: Draft) -> tuple[int, ...]:
    """The nodes that the target accepts."""
    return draft.path_of([RIGHT] * len(draft))


class SimulatedTarget(SimulatedEngine):
    def __init__(self, address: str, cost: Cost) -> None:
        super().__init__(address, cost)
        self._batch_delay = BatchDelay(asyncio.get_running_loop().time)
        self._ahead: dict[SimulatedStream, tuple[int, Draft]] = {}  # trees, and how many tokens they follow

    def work_of(self, stream: SimulatedStream, request: Any, arrived: float) -> Work | None:
        kind = request.WhichOneof("request")
        turn = getattr(request, kind).turn
        end = turn.base + len(turn.tokens)
        if kind == "top_up":
            if stream.work is None:
                return Work(turn.round, 1, arrived, until=request.top_up.until)
            stream.work.until = request.top_up.until
            return stream.work
        if kind == "extend":
            self._ahead[stream] = end, draft_from_message(request.extend.draft)
            work = stream.work or self._following(stream, turn.round)
            if work is not None:
                self._batch_delay.left(stream)
            return work
        draft = draft_from_message(request.verify.draft) if kind == "verify" else None
        self._batch_delay.returned(stream, arrived)
        self._ahead.pop(stream, None)
        missing = end - min(stream.written, end - 1)
        stream.said = end
        if draft is None:
            return Work(turn.round, missing, arrived, until=request.plain.until)
        return Work(turn.round, missing + len(draft), arrived, draft=draft)

    def _following(self, stream: SimulatedStream, round_number: int) -> Work | None:
        """What the newest Verdict leaves of a tree, to be verified."""
        if stream not in self._ahead or stream.said >= stream.sequence.limit:
            return None
        base, tree = self._ahead[stream]
        draft = tree.after([RIGHT] * (stream.said - base))
        tokens = stream.said - stream.written + len(draft)
        now = asyncio.get_running_loop().time()
        return Work(round_number, tokens, now, draft=draft) if draft else None

    def advance(self, stream: SimulatedStream, work: Work, timings: rounds_pb2.Timings) -> None:
        accepted = right_path(work.draft) if work.draft else ()
        stream.written = stream.said + len(accepted)
        stream.said = stream.written + 1
        finished = stream.said >= stream.sequence.limit
        if work.until is None:
            stream.work = self._following(stream, work.round)
            if stream.work is None and not finished:
                self._batch_delay.answered([stream])
        else:
            stream.work = None if finished or stream.said >= work.until else work
            work.tokens, work.since = 1, asyncio.get_running_loop().time()
        stream.answer(
            rounds_pb2.TargetReply(
                round=work.round,
                accepted=accepted,
                tokens=[RIGHT] * (len(accepted) + 1),
                finish_reason="length" if finished else None,
                timings=timings,
                load=rounds_pb2.Load(
                    decoding=sum(len(other.sequence.generated) > 0 for other in self._streams)
                ),
            )
        )

    def leave(self, stream: SimulatedStream) -> None:
        super().leave(stream)
        self._ahead.pop(stream, None)
        self._batch_delay.left(stream)

    def stepped(self, step: Step) -> None:
        self._batch_delay.stepped(step)

    def patience(self, working: list[SimulatedStream]) -> float:
        works = [stream.work for stream in working if stream.work is not None]
        if any(work.until is not None for work in works):
            return 0.0
        return self._batch_delay.patience([work.tokens for work in works])


@dataclass
class _Prepared:
    """Branches that follow the likely verdicts on a Draft; all of them grow by a token with every step.

    The one after the whole Draft begins a step later: the last drafted token has to be fed first.
    """

    round: int
    base: int  # tokens that the Draft follows
    draft: Draft
    is_foreseen: bool  # whether one of the branches is for the Verdict that will come
    steps: list[float] = field(default_factory=list)  # seconds
    fed: int = 0  # tokens

    @property
    def accepted(self) -> int:
        return len(right_path(self.draft))

    @property
    def end(self) -> int:
        """Tokens of the sequence after the Verdict."""
        return self.base + self.accepted + 1

    @property
    def known(self) -> int:
        """Tokens of the next Draft."""
        depth = len(self.draft)
        grown = min(len(self.steps) - (self.accepted == depth), depth)
        return max(grown, 0) if self.is_foreseen else 0

    @property
    def is_complete(self) -> bool:
        return len(self.steps) > len(self.draft)

    def observed(self) -> rounds_pb2.AheadOutcome:
        """What it was good for, now that the Verdict is there."""
        used = len(self.steps) if self.known else 0
        saved_s = sum(self.steps[: self.known])
        return rounds_pb2.AheadOutcome(
            tokens=self.known, saved_ns=int(saved_s * 1e9), wasted_tokens=self.fed - used
        )

    def tree(self, guesses: list[int]) -> Draft:
        """guesses: the next Draft."""
        if not self.is_foreseen:
            return self.draft
        tokens = [RIGHT, *guesses]
        first = len(self.draft)
        parents = [self.accepted - 1, *range(first, first + len(guesses))]
        return Draft((*self.draft.tokens, *tokens), (*self.draft.parents, *parents))


class SimulatedDraft(SimulatedEngine):
    def __init__(
        self, address: str, cost: Cost, is_right: Callable[[Sequence, int], bool], ahead: Ahead
    ) -> None:
        """is_right: whether a draft guesses the token at a position, given those before it."""
        super().__init__(address, cost)
        self._is_right = is_right
        self._ahead = ahead
        self._prepared: dict[SimulatedStream, _Prepared] = {}

    def work_of(self, stream: SimulatedStream, request: Any, arrived: float) -> Work | None:
        turn, depth = request.propose.turn, request.propose.depth
        end = turn.base + len(turn.tokens)
        prepared = self._prepared.pop(stream, None)
        ahead = prepared.observed() if prepared is not None and prepared.end == end else None
        known = ahead.tokens if ahead is not None else 0
        missing = 1 if known else end - min(stream.written, end - 1)
        stream.said = end
        work = Work(turn.round, missing, arrived, depth=depth, steps=max(depth, 1) - known, ahead=ahead)
        if work.steps > 0:
            return work
        waited_s = asyncio.get_running_loop().time() - arrived
        self._propose(stream, work, rounds_pb2.Timings(total_ns=int(waited_s * 1e9)))
        return None

    def advance(self, stream: SimulatedStream, work: Work, timings: rounds_pb2.Timings) -> None:
        work.tokens = 1
        work.steps -= 1
        if not work.steps:
            self._propose(stream, work, timings)

    def _propose(self, stream: SimulatedStream, work: Work, timings: rounds_pb2.Timings) -> None:
        draft = Draft.chain(self._guesses(stream, stream.said, work.depth))
        accepted = len(right_path(draft))
        stream.written = stream.said + min(accepted, max(work.depth - 1, 0))
        stream.work = None
        stream.answer(
            rounds_pb2.DraftReply(
                round=work.round,
                proposed=rounds_pb2.Proposed(draft=draft_to_message(draft), ahead=work.ahead),
                timings=timings,
            )
        )
        if draft and self._ahead.branches:
            last = stream.said + accepted
            is_foreseen = is_foreseen_at(self._ahead.foreseen_rate, stream.sequence, last)
            self._prepared[stream] = _Prepared(work.round, stream.said, draft, is_foreseen)

    def _guesses(self, stream: SimulatedStream, base: int, depth: int) -> list[int]:
        positions = range(base, base + depth)
        return [RIGHT if self._is_right(stream.sequence, position) else WRONG for position in positions]

    async def idle(self) -> bool:
        growing = [stream for stream, prepared in self._prepared.items() if not prepared.is_complete]
        if not growing:
            return False
        branches = max(self._ahead.branches // len(growing), 1)
        step = await self.forward(growing, branches * len(growing))
        for stream in growing:
            if stream.is_open:
                self._grow(stream, self._prepared[stream], step.seconds, branches)
        return True

    def _grow(self, stream: SimulatedStream, prepared: _Prepared, seconds: float, tokens: int) -> None:
        prepared.steps.append(seconds)
        prepared.fed += tokens
        if prepared.is_complete:
            room = max(stream.sequence.limit - prepared.end - 1, 0)
            guesses = self._guesses(stream, prepared.end, min(len(prepared.draft), room))
            tree = rounds_pb2.Prepared(draft=draft_to_message(prepared.tree(guesses)))
            stream.answer(rounds_pb2.DraftReply(round=prepared.round, prepared=tree))

    def leave(self, stream: SimulatedStream) -> None:
        super().leave(stream)
        self._prepared.pop(stream, None)


class SimulatedFleet(Fleet):
    """One target and one draft worker."""

    def __init__(self, target: SimulatedTarget, draft: SimulatedDraft, hop_s: float) -> None:
        super().__init__(self._both, Trust(token="of a simulated fleet"))
        self._target, self._draft, self._hop_s = target, draft, hop_s

    def _both(self) -> Iterable[Worker]:
        return [
            Worker("target", "simulated", self._target.address, 0, "here", 2, MAX_LENGTH),
            Worker("draft", "simulated", self._draft.address, 0, "here", 2, MAX_LENGTH),
        ]

    def open_target(self, sequence: Sequence, *, apart: bool = False) -> Any:
        return SimulatedStream(self._target, sequence, self._hop_s)

    def open_draft(self, sequence: Sequence) -> Any:
        return SimulatedStream(self._draft, sequence, self._hop_s)


@asynccontextmanager
async def simulated_fleet(
    target: Cost, draft: Cost, hop_s: float, is_right: Callable[[Sequence, int], bool], ahead: Ahead
) -> AsyncIterator[SimulatedFleet]:
    engines = SimulatedTarget("target", target), SimulatedDraft("draft", draft, is_right, ahead)
    running = [asyncio.create_task(engine.run()) for engine in engines]
    try:
        yield SimulatedFleet(*engines, hop_s)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def is_right_at(acceptance_rate: float, sequence: Sequence, position: int) -> bool:
    """Drawn by sequence and position alone: the same for every way to draft."""
    return _is_drawn(acceptance_rate, f"{sequence.noise_key}/{position}")


def is_foreseen_at(foreseen_rate: float, sequence: Sequence, position: int) -> bool:
    """Whether a Verdict is foreseen whose last token has that position; drawn in the same way."""
    return _is_drawn(foreseen_rate, f"{sequence.noise_key}/{position}/foreseen")


def _is_drawn(rate: float, key: str) -> bool:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < rate * 2**64
