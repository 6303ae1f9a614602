"""What makes a Draft, seen from the gateway."""

import asyncio

import pytest

from bench.patience import LIMIT_S
from decoding.settings import Sampling
from gateway import drafters
from gateway.drafters import SMALL_LAG, ModelDrafter, NgramDrafter
from gateway.errors import WorkerLostError
from gateway.sequence import Sequence
from tests.fakes.scripted import ScriptedDraft, fleet_of

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
    async with fleet_of(ScriptedDraft(ANSWER, lost_at=(3, 5, 7))) as fleet:
        sequence, drafter = drafter_of(fleet)
        await drafter.start()
        commit(sequence, 1)
        with pytest.raises(WorkerLostError):
            await drafter.propose(3, LIMIT_S)
        await drafter.recover()
        commit(sequence, 1)
        assert (await drafter.propose(2, LIMIT_S)).draft.tokens == ANSWER[2:4]
        await drafter.aclose()


async def test_ngrams_are_looked_up_in_prompt_and_output():
    async with fleet_of() as fleet:
        sequence = Sequence(PROMPT, Sampling(), noise_key=0)
        drafter = NgramDrafter(fleet, sequence)
        await drafter.start()
        sequence.generated += [9, 1]
        assert list((await drafter.propose(3, LIMIT_S)).draft.tokens) == [2, 3, 9]
        sequence.generated += [7, 9]
        assert list((await drafter.propose(2, LIMIT_S)).draft.tokens) == [1, 7]
