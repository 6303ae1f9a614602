"""A sequence goes on at a second target if the first is late, drained or far busier. The text stays."""

import asyncio
import math
from contextlib import aclosing

import pytest

from gateway.loop import second_targets, watched_target
from gateway.loop.factory import LoopFactory
from gateway.loop.loop import SequenceLoop
from gateway.loop.second_targets import SecondTargets
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence
from gateway.settings import GatewaySettings, Speculation
from gateway.workers.fleet import Fleet
from outrider.decoding.settings import Sampling
from outrider.pace.settings import PaceSettings
from outrider.telemetry.reasons import MoveReason
from protos import rounds_pb2
from tests.fakes.conversations import Cause
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget, fleet_of
from tests.support.patience import eventually

ANSWER = [*range(10, 70)]
STALLS_AFTER = 40
OFF = Speculation(mode="off", drafter="model")
FIXED = Speculation.model_validate({"mode": "fixed", "depth": 2, "drafter": "model"})
STEP_S = 1e-3  # seconds
SLOW_STEP_S = 0.05  # seconds; a second target answers long before the answer ends


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tail is known after eight replies, so that short answers have one."""
    monkeypatch.setattr(second_targets, "RENEWED_AFTER", 8)


def target(**fields) -> ScriptedTarget:
    return ScriptedTarget(ANSWER, step_s=STEP_S, is_exact=True, **fields)


def stalling(**fields) -> ScriptedTarget:
    return target(stalls_after=STALLS_AFTER, awake=asyncio.Event(), **fields)


def loop_of(fleet: Fleet, speculation: Speculation = OFF, *, share: float = 0.05, **sampling) -> SequenceLoop:
    settings = GatewaySettings(model="m", tokenizer="t", second_targets_share=share)
    sequence = GatewaySequence((5, 6, 7), Sampling(max_tokens=len(ANSWER), **sampling), noise_key=1)
    deadline = asyncio.get_running_loop().time() + 60
    return LoopFactory(fleet, Paces(PaceSettings()), settings).of(sequence, speculation, deadline)


async def text(generated: SequenceLoop) -> list[int]:
    return [token.id async for step in generated.steps() for token in step.tokens]


@pytest.mark.parametrize("speculation", [OFF, FIXED], ids=["plain", "rounds"])
async def test_sequence_whose_target_stalls_goes_on_at_the_second(speculation: Speculation) -> None:
    first, second = stalling(), target()
    async with fleet_of(first, second, ScriptedDraft(ANSWER)) as fleet:
        generated = loop_of(fleet, speculation)
        assert await text(generated) == ANSWER
        stats = generated.stats
        assert first.awake is not None
        first.awake.set()
        await first.ended.wait()  # it was told to stop
    assert (stats.hedges, stats.moves, stats.lost_targets) == (1, 1, 0)
    assert stats.second_s > 0
    assert second.kinds()[:2] == ["open", "plain"]


async def test_sequence_whose_first_target_answers_first_stays_there() -> None:
    first, second = stalling(), stalling()
    second.stalls_after = 0
    async with fleet_of(first, second) as fleet:
        generated = loop_of(fleet)
        answering = asyncio.create_task(text(generated))
        await eventually(lambda: bool(second.requests))
        assert first.awake is not None
        first.step_s = SLOW_STEP_S
        first.awake.set()
        await eventually(lambda: generated.stats.second_s > 0)
        assert not answering.done()
        assert await answering == ANSWER
        assert second.awake is not None
        second.awake.set()
        await second.ended.wait()
    assert (generated.stats.hedges, generated.stats.moves) == (1, 0)
    assert second.kinds()[-1] == "close"


@pytest.mark.parametrize(
    ("share", "exact", "verification"),
    [(0.0, True, "coupled"), (0.05, False, "coupled"), (0.05, True, "block")],
)
async def test_sequence_without_a_second_target_waits_for_the_first(
    share: float, exact: bool, verification: str
) -> None:
    first, second = stalling(), target()
    second.is_exact = exact
    async with fleet_of(first, second) as fleet:
        generated = loop_of(fleet, share=share, verification=verification)
        async with aclosing(generated.steps()) as steps:
            said = 0
            while said < STALLS_AFTER:
                said += len((await anext(steps)).tokens)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(steps), 5 * second_targets.MIN_PATIENCE_S)
    assert second.requests == []
    assert generated.stats.hedges == 0


async def test_sequence_that_no_target_has_answered_has_no_second_target() -> None:
    """It may be what stalls the target."""
    first, second = target(awake=asyncio.Event()), target()
    async with fleet_of(first, second) as fleet:
        generated = loop_of(fleet)
        generated._second_targets.patience_s = lambda link: 0.0  # type: ignore[method-assign]
        async with aclosing(generated.steps()) as steps:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(steps), 0.1)
    assert second.requests == []


async def test_second_target_that_is_lost_leaves_the_sequence_to_the_first() -> None:
    first, second = stalling(), target(lost_at=range(100), lost_with=Cause.LEAVING)
    async with fleet_of(first, second) as fleet:
        generated = loop_of(fleet)
        answering = asyncio.create_task(text(generated))
        await eventually(lambda: generated.stats.second_s > 0)
        assert first.awake is not None
        first.awake.set()
        assert await answering == ANSWER
    assert (generated.stats.moves, generated.stats.lost_targets) == (0, 0)


@pytest.mark.parametrize("share", [0.05, 0.0])
@pytest.mark.parametrize("speculation", [OFF, FIXED], ids=["plain", "rounds"])
async def test_sequence_at_a_drained_target_moves_between_two_tokens(
    speculation: Speculation, share: float
) -> None:
    first, second = target(leaving=asyncio.Event()), target()
    async with fleet_of(first, second, ScriptedDraft(ANSWER)) as fleet:
        generated, said = loop_of(fleet, speculation, share=share), []
        async for step in generated.steps():
            said += [token.id for token in step.tokens]
            if len(said) >= 10 and first.leaving is not None and not first.leaving.is_set():
                first.step_s = SLOW_STEP_S
                first.leaving.set()
                await eventually(lambda: fleet.links()[0].is_leaving)
        await first.ended.wait()
    assert said == ANSWER
    assert (generated.stats.hedges, generated.stats.moves, generated.stats.lost_targets) == (0, 1, 0)
    assert second.requests[0].HasField("open")


async def test_drained_target_that_ends_the_sequence_first_is_no_loss() -> None:
    """The second target reads the text already, so it goes on."""
    first = target(leaving=asyncio.Event(), lost_at=range(8, 100), lost_with=Cause.LEAVING)
    second = stalling()
    second.stalls_after = 0
    async with fleet_of(first, second, ScriptedDraft(ANSWER)) as fleet:
        generated = loop_of(fleet, FIXED)
        assert first.leaving is not None
        first.leaving.set()
        answering = asyncio.create_task(text(generated))
        await eventually(lambda: generated.stats.moves == 1)
        assert second.awake is not None
        second.awake.set()
        assert await answering == ANSWER
    assert generated.stats.lost_targets == 0


async def test_sequence_at_a_far_busier_target_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_target, "CHECKED_EVERY", 4)
    first, second = target(), target()
    async with fleet_of(first, second) as fleet:
        generated = loop_of(fleet)
        async with aclosing(generated.steps()) as steps:
            said = [token.id for token in (await anext(steps)).tokens]
            busy, idle = fleet.links()
            busy.streams += 10
            first.step_s = SLOW_STEP_S
            said += [token.id async for step in steps for token in step.tokens]
        assert (busy.streams, idle.streams) == (10, 0)
    assert said == ANSWER
    assert (generated.stats.hedges, generated.stats.moves) == (0, 1)


async def test_sequences_move_from_a_full_cache_to_one_with_plenty() -> None:
    async with fleet_of(target(), target()) as fleet:
        full, other = fleet.links()
        sequence = GatewaySequence((5, 6, 7), Sampling(max_tokens=100), noise_key=1)
        policy = SecondTargets(fleet, share=0.05)
        assert policy.why_move(sequence, full) is None
        full.load = rounds_pb2.Load(waiting=1, total_blocks=10)
        assert policy.why_move(sequence, full) is MoveReason.FULL
        other.load = rounds_pb2.Load(free_blocks=4, total_blocks=10)
        assert policy.why_move(sequence, full) is None


async def test_second_targets_spend_no_more_than_their_share() -> None:
    async with fleet_of(target(), target()) as fleet:
        first, _ = fleet.links()
        sequence = GatewaySequence((5, 6, 7), Sampling(max_tokens=100), noise_key=1)
        policy = SecondTargets(fleet, share=0.05)
        step = rounds_pb2.Step(ns=2 * 10**9, sequences=2)
        reply = rounds_pb2.TargetReply(timings=rounds_pb2.Timings(last_step=step))
        spent, worked, count = 0.0, 0.0, 0
        for _ in range(1000):
            policy.observe(first, reply, 0.01)
            worked += 1.0
            if policy.choose(sequence, first, MoveReason.LATE) is not None:
                policy.began()
                policy.ended(0.5, 0.5)
                spent, count = spent + 0.5, count + 1
        assert 0.04 * worked < spent <= 0.05 * worked + second_targets.START_S
        assert count > 50


async def test_patience_is_unknown_before_the_target_has_replied_often() -> None:
    async with fleet_of(target()) as fleet:
        (link,) = fleet.links()
        policy, reply = SecondTargets(fleet, share=0.05), rounds_pb2.TargetReply()
        assert policy.patience_s(link) == math.inf
        for _ in range(8):
            policy.observe(link, reply, 0.2)
        assert policy.patience_s(link) == pytest.approx(0.3)


async def test_long_stall_may_spend_what_is_not_saved_yet_up_to_a_bound() -> None:
    async with fleet_of(target(), target()) as fleet:
        first, _ = fleet.links()
        sequence = GatewaySequence((5, 6, 7), Sampling(max_tokens=100), noise_key=1)
        policy, reply = SecondTargets(fleet, share=0.05), rounds_pb2.TargetReply()
        for _ in range(8):
            policy.observe(first, reply, 0.01)
        policy.began()
        policy.ended(second_targets.START_S + 1, None)
        long_s = 1.01 * second_targets.LONG * policy.patience_s(first)
        assert policy.choose(sequence, first, MoveReason.LATE, 0.9 * long_s) is None
        assert policy.choose(sequence, first, MoveReason.LATE, long_s) is not None
        policy.began()
        policy.ended(second_targets.DEBT_S, None)
        assert policy.choose(sequence, first, MoveReason.LATE, long_s) is None


async def test_patience_is_at_least_as_long_as_a_second_target_takes_to_answer() -> None:
    async with fleet_of(target()) as fleet:
        (link,) = fleet.links()
        policy, reply = SecondTargets(fleet, share=0.05), rounds_pb2.TargetReply()
        for _ in range(8):
            policy.observe(link, reply, 0.01)
        before = policy.patience_s(link)
        policy.began()
        policy.ended(0.1, answered_s=None)
        assert policy.patience_s(link) == before
        for _ in range(100):
            policy.began()
            policy.ended(0.1, answered_s=0.7)
        assert policy.patience_s(link) == pytest.approx(0.7, rel=1e-3)


async def test_drained_target_gets_no_new_sequence() -> None:
    first, second = target(leaving=asyncio.Event()), target()
    async with fleet_of(first, second) as fleet:
        sequence = GatewaySequence((5, 6, 7), Sampling(max_tokens=8), noise_key=1)
        link = fleet.links()[0]
        link.connection()
        assert first.leaving is not None
        first.leaving.set()
        await eventually(lambda: link.is_leaving)
        assert fleet.open_target(sequence).address != link.worker.address
        assert fleet.second_targets(sequence, fleet.links()[1]) == []
