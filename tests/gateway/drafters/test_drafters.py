"""Drafters, seen from the gateway."""

import asyncio
import math

import pytest

from gateway.drafters.factory import Drafters
from gateway.drafters.index import GatewayDrafter
from gateway.drafters.mixed import MixedDrafter
from gateway.drafters.target import VerdictDrafter
from gateway.drafters.worker import WorkerDrafter
from gateway.errors import WorkerLostError
from gateway.roster import Roster
from gateway.sequence import GatewaySequence, VerdictDraft
from outrider.decoding.draft import Draft, SparseProbs
from outrider.decoding.settings import Sampling
from outrider.drafters.past_answers import PastAnswers, Scope
from protos import rounds_pb2
from tests.fakes.scripted import VOCAB_SIZE, ScriptedDraft, ScriptedTarget, fleet_of

ANSWER = [*range(10, 200)]
PROMPT = (1, 2, 3)
ROSTER = Roster({"model": "model"})


def drafter_of(fleet):
    sequence = GatewaySequence(PROMPT, Sampling(max_tokens=len(ANSWER)), noise_key=0, round=1)
    return sequence, WorkerDrafter(fleet, "model", sequence)


def ngram_of(fleet, sequence):
    return Drafters(fleet, ROSTER).of(ROSTER.find("ngram"), sequence)


def commit(sequence, count):
    sequence.generated.extend(ANSWER[len(sequence.generated) :][:count])
    sequence.round += 1


async def test_worker_drafter_propose_follows_the_committed_tokens():
    async with fleet_of(ScriptedDraft(ANSWER)) as fleet:
        sequence, drafter = drafter_of(fleet)
        assert not (await drafter.propose(0)).draft
        commit(sequence, 2)
        proposal = await drafter.propose(3)
        drafter.close()
    assert proposal.draft == Draft.chain(ANSWER[2:5])
    assert proposal.base == len(PROMPT) + 2


async def test_worker_drafter_cancelled_propose_leaves_the_next_its_answer():
    silent = asyncio.Event()
    async with fleet_of(ScriptedDraft(ANSWER, silent=silent)) as fleet:
        sequence, drafter = drafter_of(fleet)
        commit(sequence, 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(drafter.propose(3), 0.02)
        silent.set()
        commit(sequence, 1)
        proposal = await drafter.propose(3)
        drafter.close()
    assert proposal.draft == Draft.chain(ANSWER[2:5])


async def test_worker_drafter_after_a_loss_opens_a_stream_that_catches_up():
    worker = ScriptedDraft(ANSWER, lost_at=(3, 5))
    async with fleet_of(worker) as fleet:
        sequence, drafter = drafter_of(fleet)
        await drafter.propose(0)
        commit(sequence, 1)
        for _ in range(2):
            with pytest.raises(WorkerLostError, match="lost by the script"):
                await drafter.propose(3)
        commit(sequence, 64)
        assert (await drafter.propose(2)).draft == Draft.chain(ANSWER[65:67])
        opened = [request for request in worker.requests if request.HasField("open")]
        newest = worker.requests[-1].propose
        drafter.close()
    assert [request.epoch for request in opened] == [1, 2, 3]
    assert {request.sequence for request in worker.requests} == {sequence.number}
    assert (newest.turn.base, len(newest.turn.tokens)) == (0, len(sequence))


async def test_worker_drafter_prepared_tree_comes_after_the_draft():
    async with fleet_of(ScriptedDraft(ANSWER, prepares=True)) as fleet:
        _, drafter = drafter_of(fleet)
        proposal = await drafter.propose(3)
        assert await proposal.following() == Draft.chain(ANSWER[:6])
        drafter.close()


@pytest.mark.parametrize(
    ("draft", "wrong"),
    [
        ({"tokens": [1, 2], "parents": [-1]}, "parents has 1 entries"),
        ({"tokens": [1, 2], "parents": [-1, 1]}, "an earlier node"),
        ({"tokens": [1, 1], "parents": [-1, -1]}, "siblings"),
        ({"tokens": [VOCAB_SIZE], "parents": [-1]}, f"token {VOCAB_SIZE}"),
        ({"tokens": range(1025), "parents": range(-1, 1024)}, "1025 nodes"),
        (
            {"tokens": [1], "parents": [-1], "draft_probs": [{"token_ids": [1], "probs": [1.0]}]},
            "does not ask for",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_worker_drafter_malformed_draft_is_a_lost_worker(monkeypatch, draft, wrong):
    """The target would refuse the Draft, and with it a request that nothing is wrong with."""
    monkeypatch.setattr(ScriptedDraft, "_draft", lambda *_: rounds_pb2.Draft(**draft))
    async with fleet_of(ScriptedDraft(ANSWER)) as fleet:
        sequence, drafter = drafter_of(fleet)
        commit(sequence, 1)
        with pytest.raises(WorkerLostError, match=wrong):
            await drafter.propose(2)


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
async def test_worker_drafter_rejection_without_probs_is_a_lost_worker(monkeypatch, probs):
    draft = rounds_pb2.Draft(
        tokens=[1], parents=[-1], draft_probs=[rounds_pb2.SparseProbs(**p) for p in probs]
    )
    monkeypatch.setattr(ScriptedDraft, "_draft", lambda *_: draft)
    async with fleet_of(ScriptedDraft(ANSWER)) as fleet:
        sampling = Sampling(max_tokens=len(ANSWER), verification="rejection")
        drafter = WorkerDrafter(fleet, "model", GatewaySequence(PROMPT, sampling, noise_key=0, round=1))
        with pytest.raises(WorkerLostError, match="draft_probs"):
            await drafter.propose(2)


@pytest.mark.parametrize("rule", ["rejection", "block"])
async def test_gateway_drafter_rejection_gives_certain_probs(rule):
    async with fleet_of() as fleet:
        sequence = GatewaySequence((1, 2, 3, 1, 2), Sampling(verification=rule), noise_key=0)
        draft = (await ngram_of(fleet, sequence).propose(2)).draft
    assert draft == Draft.chain([3, 1], [SparseProbs((3,), (1.0,)), SparseProbs((1,), (1.0,))])


async def test_gateway_drafter_long_prompt_yields_to_other_tasks():
    async with fleet_of() as fleet:
        drafter = ngram_of(fleet, GatewaySequence(tuple(range(20_000)), Sampling(), noise_key=0))
        looking, turns = asyncio.create_task(drafter.propose(0)), 0
        while not looking.done():
            await asyncio.sleep(0)
            turns += 1
    assert turns > 20


async def test_gateway_drafter_looks_up_prompt_and_output():
    async with fleet_of() as fleet:
        sequence = GatewaySequence(PROMPT, Sampling(), noise_key=0)
        drafter = ngram_of(fleet, sequence)
        await drafter.propose(0)
        sequence.generated += [9, 1]
        assert (await drafter.propose(3)).draft.tokens == (2, 3, 9)
        sequence.generated += [7, 9]
        assert (await drafter.propose(2)).draft.tokens == (1, 7)


async def test_drafters_of_each_name_makes_its_class():
    async with fleet_of() as fleet:
        sequence = GatewaySequence(PROMPT, Sampling(), noise_key=0)
        names = ("model", "ngram", "suffix", "model+suffix")
        kinds = [type(Drafters(fleet, ROSTER).of(ROSTER.find(name), sequence)) for name in names]
        assert kinds == [WorkerDrafter, GatewayDrafter, GatewayDrafter, MixedDrafter]


@pytest.mark.parametrize(("maker", "count"), [("eagle3", 3), ("eagle3+suffix", 6)])
async def test_verdict_drafter_cuts_a_draft_unless_an_index_has_made_it_deeper(maker, count):
    sequence = GatewaySequence(PROMPT, Sampling(max_tokens=len(ANSWER)), noise_key=0)
    sequence.draft = VerdictDraft(Draft.chain(ANSWER[:6]), maker, None, is_of_host=False)
    proposal = await VerdictDrafter(sequence).propose(3)
    assert proposal.draft == Draft.chain(ANSWER[:count])
    assert (proposal.wanted, proposal.asked) == (3, maker)


async def test_target_is_told_past_answers_of_its_scope_for_drafts_that_suffixes_are_united_with():
    roster, mine = Roster({}, ["eagle3"]), Scope("my key", "code")
    told = []
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        drafters = Drafters(fleet, roster, PastAnswers(100))
        before = GatewaySequence(PROMPT, Sampling(), noise_key=0, scope=mine, generated=[7, 8, 9])
        drafters.of(roster.find("eagle3+suffix"), before).close()
        for name, scope in (
            ("eagle3+suffix", mine),
            ("eagle3+suffix", Scope("their key", "code")),
            ("eagle3", mine),
        ):
            sequence = GatewaySequence(PROMPT, Sampling(), noise_key=0, scope=scope)
            drafters.of(roster.find(name), sequence)
            opening = fleet.open_target(sequence, is_isolated=False)._opening()
            told.append([[*answer.ids] for answer in opening.past])
    assert told == [[[7, 8, 9]], [], []]
