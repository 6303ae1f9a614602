"""What makes a Draft, seen from the gateway."""

import asyncio
import math

import pytest

from bench.patience import LIMIT_S
from gateway.drafters import drafters
from gateway.drafters.drafters import SMALL_LAG, ModelDrafter, NgramDrafter
from gateway.errors import WorkerLostError
from gateway.rounds.sequence import Sequence
from outrider.decoding.settings import Sampling
from protos import rounds_pb2
from tests.fakes.scripted import VOCAB_SIZE, ScriptedDraft, fleet_of

ANSWER = [*range(10, 200)]
PROMPT = (1, 2, 3)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(drafters, "SHORTEST_PAUSE_S", 0.001)


def drafter_of(fleet):
    sequence = Sequence(PROMPT, Sampling(max_tokens=len(ANSWER)), noise_key=0, round=1)
    return sequence, ModelDrafter(fleet, sequence)


def commit(sequence, count):
    sequence.generated.extend(ANSWER[len(sequence.generated) :][:count])
    sequence.round += 1


async def test_taking_in_the_prompt_waits_for_no_answer():
    draft = ScriptedDraft(ANSWER, silent=asyncio.Event())
    async with fleet_of(draft) as fleet:
        _, drafter = drafter_of(fleet)
        await drafter.start()
        await drafter.aclose()


async def test_a_draft_follows_the_committed_tokens():
    async with fleet_of(ScriptedDraft(ANSWER)) as fleet:
        sequence, drafter = drafter_of(fleet)
        await drafter.start()
        commit(sequence, 2)
        reply = await drafter.propose(3, LIMIT_S)
        await drafter.aclose()
    assert reply is not None
    assert list(reply.draft.tokens) == ANSWER[2:5]


async def test_a_late_draft_is_none_and_recovery_waits_for_it():
    silent = asyncio.Event()
    async with fleet_of(ScriptedDraft(ANSWER, silent=silent)) as fleet:
        sequence, drafter = drafter_of(fleet)
        await drafter.start()
        commit(sequence, 1)
        assert await drafter.propose(3, patience_s=0.02) is None
        recovery = asyncio.create_task(drafter.recover())
        assert not (await asyncio.wait({recovery}, timeout=0.05))[0]
        silent.set()
        await recovery
        commit(sequence, 1)
        reply = await drafter.propose(3, LIMIT_S)
        await drafter.aclose()
    assert reply is not None
    assert list(reply.draft.tokens) == ANSWER[2:5]


async def test_a_late_worker_is_told_what_it_missed_before_it_is_asked_again():
    silent = asyncio.Event()
    worker = ScriptedDraft(ANSWER, silent=silent)
    async with fleet_of(worker) as fleet:
        sequence, drafter = drafter_of(fleet)
        await drafter.start()
        commit(sequence, 1)
        assert await drafter.propose(3, patience_s=0.02) is None
        commit(sequence, 2 * SMALL_LAG)
        silent.set()
        await drafter.recover()
        newest = worker.requests[-1].propose
        await drafter.aclose()
    assert (newest.depth, newest.turn.base + len(newest.turn.tokens)) == (0, len(sequence))


async def test_recovery_catches_up_with_what_was_decoded_meanwhile():
    draft = ScriptedDraft(ANSWER, lost_at=(3,))
    async with fleet_of(draft) as fleet:
        sequence, drafter = drafter_of(fleet)
        await drafter.start()
        commit(sequence, 1)
        with pytest.raises(WorkerLostError, match="lost by the script"):
            await drafter.propose(3, LIMIT_S)
        commit(sequence, 2 * SMALL_LAG)
        await drafter.recover()
        opened = [request for request in draft.requests if request.HasField("open")]
        newest = draft.requests[-1].propose
        await drafter.aclose()
    assert [request.open.epoch for request in opened] == [1, 2]
    assert (newest.depth, newest.turn.base, len(newest.turn.tokens)) == (0, 0, len(sequence))


async def test_recovery_outlasts_a_worker_that_is_lost_again():
    async with fleet_of(ScriptedDraft(ANSWER, lost_at=(3, 5))) as fleet:
        sequence, drafter = drafter_of(fleet)
        await drafter.start()
        commit(sequence, 1)
        with pytest.raises(WorkerLostError):
            await drafter.propose(3, LIMIT_S)
        await drafter.recover()
        commit(sequence, 1)
        assert (await drafter.propose(2, LIMIT_S)).draft.tokens == ANSWER[2:4]
        await drafter.aclose()


@pytest.mark.parametrize(
    ("draft", "wrong"),
    [
        ({"tokens": [1, 2], "parents": [-1]}, "no tree"),
        ({"tokens": [1, 2], "parents": [-1, 1]}, "no tree"),
        ({"tokens": [1, 1], "parents": [-1, -1]}, "siblings"),
        ({"tokens": [VOCAB_SIZE], "parents": [-1]}, f"token {VOCAB_SIZE}"),
        ({"tokens": range(1025), "parents": range(-1, 1024)}, "1025 nodes"),
        ({"tokens": [1, 2], "parents": [-1, 0], "draft_probs": [{}]}, "does not ask for"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_draft_that_makes_no_sense_is_a_lost_worker(monkeypatch, draft, wrong):
    """The target would refuse it, and with it a request that nothing is wrong with."""
    reply = rounds_pb2.DraftReply(epoch=1, draft=rounds_pb2.Draft(**draft))
    monkeypatch.setattr(ScriptedDraft, "_reply", lambda self, propose, *_: _for(reply, propose))
    async with fleet_of(ScriptedDraft(ANSWER)) as fleet:
        sequence, drafter = drafter_of(fleet)
        await drafter.start()
        commit(sequence, 1)
        with pytest.raises(WorkerLostError, match=wrong):
            await drafter.propose(2, LIMIT_S)


@pytest.mark.parametrize(
    "probs",
    [
        [],
        [{"token_ids": [2], "probs": [1.0]}],
        [{"token_ids": [1, VOCAB_SIZE], "probs": [0.5, 0.5]}],
        [{"token_ids": [1, 2], "probs": [0.5, 0.6]}],
        [{"token_ids": [1, 2], "probs": [1.0, 0.0]}],
        [{"token_ids": [1, 2], "probs": [math.nan, 1.0]}],
        [{"token_ids": [1, 2], "probs": [1.0]}],
    ],
    ids=["none", "without the token", "of an unknown token", "above 1", "of 0", "of NaN", "too few"],
)
async def test_ratio_rules_need_to_know_what_a_draft_was_drawn_from(monkeypatch, probs):
    draft = rounds_pb2.Draft(
        tokens=[1], parents=[-1], draft_probs=[rounds_pb2.SparseProbs(**p) for p in probs]
    )
    reply = rounds_pb2.DraftReply(epoch=1, draft=draft)
    monkeypatch.setattr(ScriptedDraft, "_reply", lambda self, propose, *_: _for(reply, propose))
    async with fleet_of(ScriptedDraft(ANSWER)) as fleet:
        sampling = Sampling(max_tokens=len(ANSWER), verification="rejection")
        drafter = ModelDrafter(fleet, Sequence(PROMPT, sampling, noise_key=0, round=1))
        await drafter.start()
        with pytest.raises(WorkerLostError, match="draft_probs"):
            await drafter.propose(2, LIMIT_S)


def _for(reply, propose):
    reply.round = propose.turn.round
    return reply


@pytest.mark.parametrize("rule", ["rejection", "block"])
async def test_ngrams_are_sure_of_themselves_where_a_ratio_rule_asks(rule):
    async with fleet_of() as fleet:
        sequence = Sequence((1, 2, 3, 1, 2), Sampling(verification=rule), noise_key=0)
        draft = (await NgramDrafter(fleet, sequence).propose(2, LIMIT_S)).draft
    assert list(draft.tokens) == [3, 1]
    assert [(list(probs.token_ids), list(probs.probs)) for probs in draft.draft_probs] == [
        ([3], [1.0]),
        ([1], [1.0]),
    ]


async def test_a_long_prompt_is_looked_through_while_others_have_their_turn():
    async with fleet_of() as fleet:
        drafter = NgramDrafter(fleet, Sequence(tuple(range(20_000)), Sampling(), noise_key=0))
        looking, turns = asyncio.create_task(drafter.start()), 0
        while not looking.done():
            await asyncio.sleep(0)
            turns += 1
    assert turns > 20


async def test_ngrams_are_looked_up_in_prompt_and_output():
    async with fleet_of() as fleet:
        sequence = Sequence(PROMPT, Sampling(), noise_key=0)
        drafter = NgramDrafter(fleet, sequence)
        await drafter.start()
        sequence.generated += [9, 1]
        assert list((await drafter.propose(3, LIMIT_S)).draft.tokens) == [2, 3, 9]
        sequence.generated += [7, 9]
        assert list((await drafter.propose(2, LIMIT_S)).draft.tokens) == [1, 7]
