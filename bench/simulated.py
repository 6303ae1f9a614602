"""Workers without a model: steps take as long as a cost table says, drafts are right as often as it says.

Everything else is the service's own code: rounds, drafting, pace, and when the target waits for company.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from bench.simulated_engine import Cost, SimulatedEngine, SimulatedStream, Work
from decoding.pace.cost import Step
from engine.gathering import Gathering
from gateway.fleet import Fleet
from gateway.sequence import Sequence
from gateway.streams import Worker
from protos import rounds_pb2
from protos.trust import Trust

RIGHT, WRONG = 1, 0  # the target always says RIGHT; where a draft would say WRONG is drawn beforehand
MAX_LENGTH = 1 << 20


class SimulatedTarget(SimulatedEngine):
    def __init__(self, address: str, cost: Cost) -> None:
        super().__init__(address, cost)
        self._gathering = Gathering(asyncio.get_running_loop().time)

    def work_of(self, stream: SimulatedStream, request: Any, arrived: float) -> Work:
        self._gathering.returned(stream, arrived)
        kind = request.WhichOneof("request")
        turn = getattr(request, kind).turn
        if kind == "plain" and stream.work is not None and stream.work.round == turn.round:
            stream.work.until = request.plain.until
            return stream.work
        end = turn.base + len(turn.tokens)
        missing = end - min(stream.written, end - 1)
        stream.said = end
        if kind == "plain":
            return Work(turn.round, missing, arrived, until=request.plain.until)
        draft = request.verify.draft
        return Work(turn.round, missing + len(draft.tokens), arrived, draft=draft)

    def advance(self, stream: SimulatedStream, work: Work, timings: rounds_pb2.Timings) -> None:
        accepted = 0
        if work.draft is not None:
            accepted = next(
                (i for i, token in enumerate(work.draft.tokens) if token != RIGHT), len(work.draft.tokens)
            )
        stream.written = stream.said + accepted
        stream.said += accepted + 1
        finished = stream.said >= stream.sequence.limit
        if work.until is None or stream.said >= work.until or finished:
            stream.work = None
        work.tokens, work.since = 1, asyncio.get_running_loop().time()
        if work.draft is not None and not finished:
            self._gathering.answered([stream])
        stream.answer(
            rounds_pb2.TargetReply(
                round=work.round,
                accepted=range(accepted),
                tokens=[RIGHT] * (accepted + 1),
                finish_reason="length" if finished else None,
                timings=timings,
                load=rounds_pb2.Load(
                    decoding=sum(len(other.sequence.generated) > 0 for other in self._streams)
                ),
            )
        )

    def leave(self, stream: SimulatedStream) -> None:
        super().leave(stream)
        self._gathering.left(stream)

    def stepped(self, step: Step) -> None:
        self._gathering.stepped(step)

    def patience(self, working: list[SimulatedStream]) -> float:
        works = [stream.work for stream in working if stream.work is not None]
        if any(work.until is not None for work in works):
            return 0.0
        return self._gathering.patience([work.tokens for work in works])


class SimulatedDraft(SimulatedEngine):
    def __init__(self, address: str, cost: Cost, is_right: Callable[[Sequence, int], bool]) -> None:
        """is_right: whether a draft guesses the token at a position, given those before it."""
        super().__init__(address, cost)
        self._is_right = is_right

    def work_of(self, stream: SimulatedStream, request: Any, arrived: float) -> Work:
        propose = request.propose
        end = propose.turn.base + len(propose.turn.tokens)
        missing = end - min(stream.written, end - 1)
        stream.said = end
        return Work(propose.turn.round, missing, arrived, depth=propose.depth, steps=max(propose.depth, 1))

    def advance(self, stream: SimulatedStream, work: Work, timings: rounds_pb2.Timings) -> None:
        work.tokens = 1
        work.steps -= 1
        if work.steps:
            return
        depth = work.depth
        right = [self._is_right(stream.sequence, stream.said + ahead) for ahead in range(depth)]
        stream.written = stream.said + (right.index(False) if False in right else max(depth - 1, 0))
        stream.work = None
        stream.answer(
            rounds_pb2.DraftReply(
                round=work.round,
                draft=rounds_pb2.Draft(
                    tokens=[RIGHT if hit else WRONG for hit in right], parents=range(-1, depth - 1)
                ),
                timings=timings,
            )
        )


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

    def open_target(self, sequence: Sequence) -> Any:
        return SimulatedStream(self._target, sequence, self._hop_s)

    def open_draft(self, sequence: Sequence) -> Any:
        return SimulatedStream(self._draft, sequence, self._hop_s)


@asynccontextmanager
async def simulated_fleet(
    target: Cost, draft: Cost, hop_s: float, is_right: Callable[[Sequence, int], bool]
) -> AsyncIterator[SimulatedFleet]:
    engines = SimulatedTarget("target", target), SimulatedDraft("draft", draft, is_right)
    running = [asyncio.create_task(engine.run()) for engine in engines]
    try:
        yield SimulatedFleet(*engines, hop_s)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def is_right_at(acceptance_rate: float, sequence: Sequence, position: int) -> bool:
    """Drawn by sequence and position alone: the same for every way to draft."""
    digest = hashlib.blake2b(f"{sequence.noise_key}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) < acceptance_rate * 2**64
