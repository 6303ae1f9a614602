"""The draft-then-verify loop, against workers whose answer is written down beforehand."""

import asyncio
from contextlib import aclosing
from dataclasses import asdict

import pytest

from decoding.settings import Sampling
from gateway.errors import WorkerLostError
from gateway.rounds import PLAIN_STRETCH, Record, Rounds
from gateway.sequence import Sequence
from gateway.settings import GatewaySettings, Speculation
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget, fleet_of

PROMPT = (5, 6, 7)
ANSWER = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120]
ANSWER_LENGTH = len(ANSWER)
OFF = Speculation(mode="off", drafter="model")


def fixed(depth: int, drafter: str = "model") -> Speculation:
    return Speculation.model_validate({"mode": "fixed", "depth": depth, "drafter": drafter})


def rounds_of(fleet, speculation, max_tokens=ANSWER_LENGTH, prompt=PROMPT, deadline_ms=5000.0):
    settings = GatewaySettings(model="m", tokenizer="t", draft_deadline_ms=deadline_ms)
    sequence = Sequence(prompt, Sampling(max_tokens=max_tokens), noise_key=1)
    return sequence, Rounds(sequence, fleet, speculation, settings)


async def run(fleet, speculation, **settings) -> tuple[list[int], Record]:
    sequence, rounds = rounds_of(fleet, speculation, **settings)
    emitted = [token async for reply in rounds.replies() for token in reply.tokens]
    assert emitted == sequence.generated
    return emitted, rounds.record


@pytest.mark.parametrize("depth", range(1, 9))
@pytest.mark.parametrize("wrong", [(), (0,), (1, 4), range(len(ANSWER))], ids=str)
async def test_the_text_is_the_target_s_whatever_is_drafted(depth, wrong):
    draft = ScriptedDraft(ANSWER, wrong=wrong)
    async with fleet_of(ScriptedTarget(ANSWER), draft) as fleet:
        emitted, record = await run(fleet, fixed(depth))
    assert emitted == ANSWER
    assert record.accepted + record.target_passes == len(ANSWER)


@pytest.mark.parametrize("speculation", [OFF, fixed(4), fixed(4, "ngram")], ids=str)
async def test_every_mode_gives_the_same_text_and_says_goodbye(speculation):
    answer = ANSWER * 12
    target = ScriptedTarget(answer)
    async with fleet_of(target, ScriptedDraft(answer)) as fleet:
        emitted, _ = await run(fleet, speculation, max_tokens=len(answer))
        await target.ended.wait()
    assert emitted == answer
    assert target.kinds()[-1] == "close"


async def test_counts_what_speculation_did():
    # After the first token: 3 right, then 1 right and 1 wrong, then 3 right, then one position is left.
    draft = ScriptedDraft(ANSWER, wrong=[6])
    async with fleet_of(ScriptedTarget(ANSWER), draft) as fleet:
        _, record = await run(fleet, fixed(3))
    assert asdict(record) == {
        "rounds": 3,
        "drafted": 9,
        "verified": 3 + 2 + 3,
        "accepted": 3 + 1 + 3,
        "target_passes": 5,
        "late_drafts": 0,
        "draft_lost": False,
    }


async def test_the_draft_goes_on_to_the_target_as_it_came():
    target = ScriptedTarget(ANSWER)
    async with fleet_of(target, ScriptedDraft(ANSWER, wrong=[2])) as fleet:
        await run(fleet, fixed(3))
    verify = target.requests[2].verify
    assert list(verify.draft.tokens) == [20, 30 ^ 1, 40]
    assert list(verify.draft.parents) == [-1, 0, 1]


async def test_depth_never_exceeds_what_is_left_to_generate():
    draft = ScriptedDraft(ANSWER)
    async with fleet_of(ScriptedTarget(ANSWER[:7]), draft) as fleet:
        await run(fleet, fixed(4), max_tokens=7)
    depths = [request.propose.depth for request in draft.requests if request.HasField("propose")]
    # The prompt; one token is out, six are left, one of them the target's own; then one is left.
    assert depths == [0, 4, 0]


async def test_each_message_holds_what_the_worker_was_not_told():
    target, draft = ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)
    async with fleet_of(target, draft) as fleet:
        await run(fleet, fixed(4))
    turns = [request.verify.turn for request in target.requests if request.HasField("verify")]
    assert [(turn.round, turn.base, list(turn.tokens)) for turn in turns] == [
        (1, 0, [5, 6, 7]),
        (2, 3, [10]),
        (3, 4, [20, 30, 40, 50, 60]),
        (4, 9, [70, 80, 90, 100, 110]),
    ]
    epochs = {request.open.epoch for request in (target.requests[0], draft.requests[0])}
    assert epochs == {1, 2}


async def test_the_first_token_does_not_wait_for_the_draft():
    silent = asyncio.Event()
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER, silent=silent)) as fleet:
        _, rounds = rounds_of(fleet, fixed(4), deadline_ms=3_600_000.0)
        async with aclosing(rounds.replies()) as replies:
            assert (await anext(replies)).tokens == [10]
            silent.set()
            emitted = [token async for reply in replies for token in reply.tokens]
    assert emitted == ANSWER[1:]


async def test_a_round_goes_without_a_draft_that_is_late():
    draft = ScriptedDraft(ANSWER, silent=asyncio.Event())
    async with fleet_of(ScriptedTarget(ANSWER), draft) as fleet:
        emitted, record = await run(fleet, fixed(4), deadline_ms=20.0)
    assert emitted == ANSWER
    assert (record.accepted, record.target_passes) == (0, len(ANSWER))
    assert record.late_drafts == len(ANSWER) - 1


async def test_drafting_goes_on_once_the_overdue_draft_has_come():
    silent = asyncio.Event()
    answer = ANSWER * 20
    async with fleet_of(ScriptedTarget(answer), ScriptedDraft(answer, silent=silent)) as fleet:
        sequence, rounds = rounds_of(fleet, fixed(4), max_tokens=len(answer), deadline_ms=20.0)
        async for _ in rounds.replies():
            if len(sequence.generated) == 10:
                assert rounds.record.late_drafts > 0
                silent.set()
    assert sequence.generated == answer
    assert rounds.record.accepted > 0


@pytest.mark.parametrize("lost_after", [1, 2, 3, 4])
async def test_a_lost_draft_never_fails_a_request(lost_after):
    target, draft = ScriptedTarget(ANSWER), ScriptedDraft(ANSWER, wrong=[2, 5], lost_after=lost_after)
    async with fleet_of(target, draft) as fleet:
        emitted, record = await run(fleet, fixed(2))
    assert emitted == ANSWER
    assert record.draft_lost
    assert "plain" in target.kinds()


async def test_no_draft_worker_is_a_lost_draft():
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        emitted, record = await run(fleet, fixed(4))
    assert emitted == ANSWER
    assert record.draft_lost


async def test_a_lost_target_is_said_so():
    async with fleet_of(ScriptedTarget(ANSWER, lost_after=2), ScriptedDraft(ANSWER)) as fleet:
        with pytest.raises(WorkerLostError, match="lost by the script"):
            await run(fleet, fixed(4))


async def test_no_target_is_said_so():
    async with fleet_of(None) as fleet:
        with pytest.raises(WorkerLostError, match="no target worker"):
            await run(fleet, OFF)


@pytest.mark.parametrize("speculation", [OFF, fixed(3)], ids=str)
async def test_replies_to_older_rounds_are_dropped(speculation):
    target = ScriptedTarget(ANSWER * 12, repeats_itself=True)
    # A plain stretch is one round, in which nothing older can be repeated but what came before it.
    max_tokens = PLAIN_STRETCH // 2 if speculation is OFF else len(ANSWER) * 12
    target.answer = target.answer[:max_tokens]
    async with fleet_of(target, ScriptedDraft(target.answer, wrong=range(0, 144, 5))) as fleet:
        emitted, _ = await run(fleet, speculation, max_tokens=max_tokens)
    assert emitted == target.answer


async def test_plain_mode_asks_for_a_stretch_and_tops_it_up_at_half():
    answer = list(range(200))
    target = ScriptedTarget(answer)
    async with fleet_of(target) as fleet:
        await run(fleet, OFF, max_tokens=len(answer))
    grants = [request.plain for request in target.requests if request.HasField("plain")]
    untils = [grant.until - len(PROMPT) for grant in grants]
    assert untils == [64, 96, 128, 160, 192, 200]
    assert {grant.turn.round for grant in grants} == {1}


async def test_a_client_that_does_not_read_stops_the_grants():
    answer = list(range(200))
    target = ScriptedTarget(answer)
    async with fleet_of(target) as fleet:
        _, rounds = rounds_of(fleet, OFF, max_tokens=len(answer))
        async with aclosing(rounds.replies()) as replies:
            for _ in range(31):
                await anext(replies)
            assert target.kinds() == ["open", "plain"]


@pytest.mark.parametrize("speculation", [OFF, fixed(4)], ids=str)
async def test_a_client_that_leaves_ends_both_streams(speculation):
    answer = ANSWER * 12
    target, draft = ScriptedTarget(answer), ScriptedDraft(answer)
    async with fleet_of(target, draft) as fleet:
        _, rounds = rounds_of(fleet, speculation, max_tokens=len(answer))
        async with aclosing(rounds.replies()) as replies:
            await anext(replies)
        await target.ended.wait()
        if speculation is not OFF:
            await draft.ended.wait()
    assert "close" not in target.kinds()
