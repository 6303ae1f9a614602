"""The loop of a sequence, against workers whose answer is written down beforehand."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise

import pytest

from gateway.errors import DeadlineError, InvalidRequestError, WorkerLostError
from gateway.loop import drafter_health
from gateway.loop.factory import LoopFactory
from gateway.loop.lease import LEASE_TOKENS
from gateway.loop.stats import Stats
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence, Origin
from gateway.settings import GatewaySettings, Speculation
from gateway.workers.streams import WorkerStream
from outrider.decoding.settings import Sampling
from outrider.learning.backoff import Backoff
from outrider.pace.controller import Pace
from outrider.pace.settings import PaceSettings
from tests.fakes.conversations import Cause
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget, fleet_of
from tests.support.patience import LIMIT_S, PATIENCE, eventually, later

PROMPT = (5, 6, 7)
ANSWER = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120]
ANSWER_LENGTH = len(ANSWER)
LONG = [*range(200)]
DEPTH = 4
OFF = Speculation(mode="off", drafter="model")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(drafter_health, "RECOVERY", Backoff(0.001, 30.0))


def fixed(depth: int, drafter: str = "model") -> Speculation:
    return Speculation.model_validate({"mode": "fixed", "depth": depth, "drafter": drafter})


def rounds_of(
    fleet, speculation, max_tokens=ANSWER_LENGTH, prompt=PROMPT, deadline_ms=1e3 * LIMIT_S, deadline_s=LIMIT_S
):
    settings = GatewaySettings(model="m", tokenizer="t", propose_deadline_ms=deadline_ms)
    sequence = GatewaySequence(prompt, Sampling(max_tokens=max_tokens), noise_key=1)
    paces = Paces(PaceSettings())
    return sequence, LoopFactory(fleet, paces, settings).of(sequence, speculation, later(deadline_s))


def ids(step) -> list[int]:
    return [token.id for token in step.tokens]


async def run(fleet, speculation, **settings) -> tuple[list[int], Stats]:
    sequence, rounds = rounds_of(fleet, speculation, **settings)
    emitted = [token async for step in rounds.steps() for token in ids(step)]
    assert emitted == sequence.generated
    return emitted, rounds.stats


@pytest.mark.parametrize("depth", range(1, 9))
@pytest.mark.parametrize("wrong", [(), (0,), (1, 4), range(len(ANSWER))], ids=str)
async def test_loop_any_draft_gives_the_target_text(depth, wrong):
    draft = ScriptedDraft(ANSWER, wrong=wrong)
    async with fleet_of(ScriptedTarget(ANSWER), draft) as fleet:
        emitted, stats = await run(fleet, fixed(depth))
    assert emitted == ANSWER
    assert stats.accepted + stats.target_passes == len(ANSWER)


@pytest.mark.parametrize(
    "speculation", [OFF, fixed(4), fixed(4, "ngram"), fixed(4, "suffix"), fixed(4, "model+suffix")], ids=str
)
async def test_loop_every_mode_gives_the_same_text_and_closes(speculation):
    answer = ANSWER * 12
    target = ScriptedTarget(answer)
    async with fleet_of(target, ScriptedDraft(answer)) as fleet:
        emitted, _ = await run(fleet, speculation, max_tokens=len(answer))
        await target.ended.wait()
    assert emitted == answer
    assert target.kinds()[-1] == "close"


async def test_stats_rounds_count_what_speculation_did():
    # After the first token: 3 correct, then 1 correct and 1 wrong, then 3 correct, then one position is left.
    draft = ScriptedDraft(ANSWER, wrong=[6])
    async with fleet_of(ScriptedTarget(ANSWER), draft) as fleet:
        _, stats = await run(fleet, fixed(3))
    assert stats.target_s > 0.0
    assert vars(replace(stats, draft_s=0.0, target_s=0.0)) == {
        "rounds": 3,
        "drafted": 9,
        "reached": 3 + 2 + 3,
        "lengths": {1: 1, 3: 2},
        "drafted_by": {"model": {"rounds": 3, "drafted": 9, "reached": 8, "accepted": 7}},
        "routed": {"model": {"named": 1}},
        "judged": {},
        "host_drafts": 0,
        "prepared_for": 0,
        "ahead_hits": {},
        "continued": 0,
        "saved_s": 0.0,
        "wasted": 0,
        "forced": 0,
        "ends": 0,
        "target_passes": 5,
        "draft_s": 0.0,
        "target_s": 0.0,
        "transitions": {},
        "late_drafts": 0,
        "lost_drafts": 0,
        "empty_drafts": 0,
        "lost_targets": 0,
        "hedges": 0,
        "moves": 0,
        "second_s": 0.0,
        "failures": {},
    }
    assert (stats.accepted, stats.mean_accepted_length, stats.accepted_lengths) == (7, 7 / 3, [0, 1, 0, 2])


async def test_round_draft_reaches_the_target_unchanged():
    target = ScriptedTarget(ANSWER)
    async with fleet_of(target, ScriptedDraft(ANSWER, wrong=[2])) as fleet:
        await run(fleet, fixed(3))
    verify = target.requests[2].decode
    assert list(verify.draft.tokens) == [20, 30 ^ 1, 40]
    assert list(verify.draft.parents) == [-1, 0, 1]


async def test_source_depth_never_exceeds_the_room():
    draft = ScriptedDraft(ANSWER)
    async with fleet_of(ScriptedTarget(ANSWER[:7]), draft) as fleet:
        await run(fleet, fixed(4), max_tokens=7)
    depths = [request.propose.depth for request in draft.requests if request.HasField("propose")]
    # The prompt; one token is out, six are left, one of them the target's own; the last one needs no Draft.
    assert depths == [0, 4]


async def test_turn_holds_only_tokens_the_worker_lacks():
    target, draft = ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)
    async with fleet_of(target, draft) as fleet:
        await run(fleet, fixed(4))
    asked = list(zip(target.requests, target.kinds(), strict=True))
    turns = [request.decode.turn for request, kind in asked if kind == "verify"]
    assert [(turn.round, turn.base, list(turn.tokens)) for turn in turns] == [
        (1, 0, [5, 6, 7]),
        (2, 3, [10]),
        (3, 4, [20, 30, 40, 50, 60]),
    ]
    (plain,) = [request.decode for request, kind in asked if kind == "plain"]
    turn = plain.turn
    assert (turn.round, turn.base, list(turn.tokens)) == (4, 9, [70, 80, 90, 100, 110])
    epochs = {request.epoch for request in (target.requests[0], draft.requests[0])}
    assert epochs == {1, 2}


async def test_round_first_token_waits_for_no_draft():
    silent = asyncio.Event()
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER, silent=silent)) as fleet:
        _, rounds = rounds_of(fleet, fixed(4), deadline_ms=3_600_000.0)
        async with aclosing(rounds.steps()) as steps:
            assert ids(await anext(steps)) == [10]
            silent.set()
            emitted = [token async for step in steps for token in ids(step)]
    assert emitted == ANSWER[1:]


async def test_source_late_draft_is_not_awaited_again():
    draft = ScriptedDraft(ANSWER, silent=asyncio.Event())
    async with fleet_of(ScriptedTarget(ANSWER), draft) as fleet:
        emitted, stats = await run(fleet, fixed(4), deadline_ms=20.0)
    assert emitted == ANSWER
    assert (stats.accepted, stats.late_drafts, stats.target_passes) == (0, 1, len(ANSWER))


async def test_pace_hears_how_long_the_target_waited_for_a_late_draft(monkeypatch):
    waits = []
    monkeypatch.setattr(Pace, "observe_late", lambda self, sequence, waited_s: waits.append(waited_s))
    draft = ScriptedDraft(ANSWER, silent=asyncio.Event())
    async with fleet_of(ScriptedTarget(ANSWER), draft) as fleet:
        await run(fleet, fixed(4), deadline_ms=20.0)
    assert waits == [0.02]


async def test_round_failed_send_ahead_is_not_awaited(monkeypatch):
    """The stream to the target lives on, but nothing follows from a message that never arrived."""
    verifying = asyncio.Event()
    send = WorkerStream.send

    def failing(stream, request):
        if request.WhichOneof("request") == "decode" and len(request.decode.draft.tokens) > DEPTH:
            verifying.set()
            raise WorkerLostError("the stream has broken")
        send(stream, request)

    monkeypatch.setattr(WorkerStream, "send", failing)
    target = ScriptedTarget(ANSWER, verifying=verifying)
    async with fleet_of(target, ScriptedDraft(ANSWER, prepares=True)) as fleet:
        emitted, _ = await run(fleet, fixed(DEPTH), deadline_s=5.0)
    assert emitted == ANSWER
    assert verifying.is_set()


@pytest.mark.parametrize(
    ("fault", "deadline_ms"), [("late", 300.0 * PATIENCE), ("lost", 1e3 * LIMIT_S)], ids=["late", "lost"]
)
async def test_source_recovered_worker_drafts_again(fault, deadline_ms):
    silent = asyncio.Event()
    draft = ScriptedDraft(
        LONG, silent=silent if fault == "late" else None, lost_at=(3,) if fault == "lost" else ()
    )
    async with fleet_of(ScriptedTarget(LONG), draft) as fleet:
        sequence, rounds = rounds_of(fleet, fixed(4), max_tokens=len(LONG), deadline_ms=deadline_ms)
        async for step in rounds.steps():
            if len(sequence.generated) > 5 and not rounds.stats.rounds:
                assert step.tokens[0].origin is Origin.PLAIN
                silent.set()
                await eventually(lambda: draft.kinds().count("propose") >= (2 if fault == "late" else 3))
    assert sequence.generated == LONG
    assert rounds.stats.late_drafts + rounds.stats.lost_drafts == 1
    assert rounds.stats.accepted > 0


@pytest.mark.parametrize("lost_at", range(2, 6))
async def test_source_lost_worker_fails_no_request(lost_at):
    target = ScriptedTarget(ANSWER)
    draft = ScriptedDraft(ANSWER, wrong=[2, 5], lost_at=range(lost_at, 100))
    async with fleet_of(target, draft) as fleet:
        emitted, stats = await run(fleet, fixed(2))
    assert emitted == ANSWER
    assert stats.lost_drafts == 1
    assert "plain" in target.kinds()


async def test_source_no_draft_worker_is_a_lost_draft():
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        emitted, stats = await run(fleet, fixed(4))
    assert emitted == ANSWER
    assert stats.lost_drafts == 1


@pytest.mark.parametrize("speculation", [OFF, fixed(3), fixed(3, "ngram")], ids=str)
@pytest.mark.parametrize("lost_at", [range(2, 100), (2,), (3, 6), (4, 6, 8)], ids=str)
async def test_loop_lost_target_goes_on_with_the_same_text(speculation, lost_at):
    lost, kept = ScriptedTarget(LONG, lost_at=lost_at), ScriptedTarget(LONG)
    async with fleet_of(lost, kept, ScriptedDraft(LONG, wrong=range(0, len(LONG), 5))) as fleet:
        emitted, stats = await run(fleet, speculation, max_tokens=len(LONG))
    assert emitted == LONG
    assert stats.lost_targets == 1
    reopened = kept.requests[0]
    assert (reopened.open.prompt_length, reopened.epoch) == (
        len(PROMPT),
        2 if speculation.drafter == "ngram" or speculation is OFF else 3,
    )
    first = kept.requests[1]
    assert getattr(first, first.WhichOneof("request")).turn.base == 0


@pytest.mark.parametrize("target_lost_at", range(2, 9))
@pytest.mark.parametrize("draft_lost_at", range(2, 7))
async def test_loop_losses_at_any_point_change_phases_and_no_text(target_lost_at, draft_lost_at):
    """The only target comes back at once, the draft after a pause: every order of the two occurs."""
    target = ScriptedTarget(LONG, lost_at=(target_lost_at, target_lost_at + 3))
    draft = ScriptedDraft(LONG, wrong=[3, 4, 40], lost_at=(draft_lost_at, draft_lost_at + 4))
    async with fleet_of(target, draft) as fleet:
        emitted, stats = await run(fleet, fixed(3), max_tokens=len(LONG))
    assert emitted == LONG
    assert stats.lost_targets in (1, 2)
    assert stats.lost_drafts >= 1


async def test_loop_target_gone_fails_at_the_deadline():
    drained = ScriptedTarget(ANSWER, lost_at=range(4, 10_000), lost_with=Cause.LEAVING)
    async with fleet_of(drained, ScriptedDraft(ANSWER)) as fleet:
        _, rounds = rounds_of(fleet, fixed(4), deadline_s=0.5)
        with pytest.raises(DeadlineError, match="no target before the request's deadline"):
            async for _ in rounds.steps():
                pass


async def test_loop_sequence_too_large_is_refused():
    target = ScriptedTarget(ANSWER, lost_at=(2,), lost_with=Cause.TOO_LARGE)
    async with fleet_of(target) as fleet:
        with pytest.raises(InvalidRequestError, match="max_tokens"):
            await run(fleet, OFF)


async def test_loop_no_target_fails_at_the_deadline():
    async with fleet_of(None) as fleet:
        _, rounds = rounds_of(fleet, OFF, deadline_s=0.05)
        with pytest.raises(DeadlineError, match="no target worker"):
            await anext(rounds.steps())


async def test_commit_each_token_has_its_origin():
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER, wrong=[6])) as fleet:
        _, rounds = rounds_of(fleet, fixed(3))
        origins = [
            token.origin.value for step in [step async for step in rounds.steps()] for token in step.tokens
        ]
    accepted, target = "accepted", "target"
    assert origins == ["plain", *[accepted] * 3, target, accepted, target, *[accepted] * 3, target, "plain"]


@pytest.mark.parametrize("speculation", [OFF, fixed(3)], ids=str)
async def test_turn_replies_to_older_rounds_are_dropped(speculation):
    target = ScriptedTarget(ANSWER * 12, repeats_itself=True)
    # Plain decoding is one round, so replies of earlier rounds alone can be repeated in it.
    max_tokens = LEASE_TOKENS // 2 if speculation is OFF else len(ANSWER) * 12
    target.answer = target.answer[:max_tokens]
    async with fleet_of(target, ScriptedDraft(target.answer, wrong=range(0, 144, 5))) as fleet:
        emitted, _ = await run(fleet, speculation, max_tokens=max_tokens)
    assert emitted == target.answer


async def test_lease_half_used_is_renewed():
    answer = list(range(200))
    target = ScriptedTarget(answer)
    async with fleet_of(target) as fleet:
        await run(fleet, OFF, max_tokens=len(answer))
    asked = [request.decode for request in target.requests if request.HasField("decode")]
    untils = [decode.lease.until - len(PROMPT) for decode in asked]
    assert untils[0] == LEASE_TOKENS
    assert untils[-1] == len(answer)
    # Tokens that come together may use up more than half of a lease, and never more than all of it.
    added = [later - earlier for earlier, later in pairwise(untils[:-1])]
    assert all(LEASE_TOKENS // 2 <= tokens <= LEASE_TOKENS for tokens in added)
    assert {decode.turn.round for decode in asked} == {1}


async def test_lease_client_that_does_not_read_stops_renewals():
    answer = list(range(200))
    target = ScriptedTarget(answer)
    async with fleet_of(target) as fleet:
        _, rounds = rounds_of(fleet, OFF, max_tokens=len(answer))
        async with aclosing(rounds.steps()) as steps:
            read = 0
            while read < LEASE_TOKENS // 2 - 1:
                read += len((await anext(steps)).tokens)
            assert target.kinds() == ["open", "plain"]


async def test_plain_tokens_that_came_while_the_gateway_was_busy_travel_together(monkeypatch):
    target, put, arrived = ScriptedTarget(LONG), WorkerStream.put, []
    monkeypatch.setattr(
        WorkerStream, "put", lambda stream, reply: (arrived.append(reply), put(stream, reply))
    )
    async with fleet_of(target) as fleet:
        sequence, rounds = rounds_of(fleet, OFF, max_tokens=len(LONG))
        async with aclosing(rounds.steps()) as steps:
            read = ids(await anext(steps))
            await eventually(lambda: len(arrived) == LEASE_TOKENS)
            read += ids(await anext(steps))
            assert len(read) == LEASE_TOKENS
            read += [token async for step in steps for token in ids(step)]
    assert read == sequence.generated == LONG


@pytest.mark.parametrize("speculation", [OFF, fixed(4)], ids=str)
async def test_loop_client_that_leaves_ends_both_streams(speculation):
    answer = ANSWER * 12
    target, draft = ScriptedTarget(answer), ScriptedDraft(answer)
    async with fleet_of(target, draft) as fleet:
        _, rounds = rounds_of(fleet, speculation, max_tokens=len(answer))
        async with aclosing(rounds.steps()) as steps:
            await anext(steps)
        await eventually(lambda: target.is_alone and draft.is_alone)
    assert target.kinds()[-1] == "close"
