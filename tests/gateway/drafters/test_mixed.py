"""Drafts of a model and of suffixes, each where it promises more."""

import pytest

from gateway.drafters.factory import Drafters
from gateway.drafters.mixed import Promises
from gateway.errors import WorkerLostError
from gateway.roster import Roster
from gateway.sequence import GatewaySequence
from outrider.decoding.draft import Draft, SparseProbs
from outrider.decoding.settings import Sampling
from outrider.drafters.occurrences import Continuation
from outrider.drafters.past_answers import PastAnswers, Scope
from outrider.drafters.registry import drafter, mixed, register
from tests.fakes.scripted import ScriptedDraft, fleet_of

REPEATED = [*range(10, 30)]
PROMPT = (*REPEATED, 1, *REPEATED[:12])
MINE = Scope("my key", "code")


def sequence_of(prompt=PROMPT, scope=MINE, **sampling):
    return GatewaySequence(tuple(prompt), Sampling(max_tokens=64, **sampling), noise_key=0, scope=scope)


def mixed_of(fleet, sequence, past=None):
    roster = Roster({"model": "model"})
    return Drafters(fleet, roster, past).of(roster.find("model+suffix"), sequence)


def commit(sequence, *tokens):
    sequence.generated.extend(tokens)
    sequence.round += 1


async def test_mixed_drafter_repeating_text_asks_no_draft_worker():
    worker = ScriptedDraft(REPEATED)
    async with fleet_of(worker) as fleet:
        drafter = mixed_of(fleet, sequence_of())
        proposal = await drafter.propose(8)
        drafter.close()
    assert (proposal.drafter, proposal.base) == ("suffix", len(PROMPT))
    assert proposal.draft == Draft.chain(REPEATED[12:])
    assert worker.requests == []


async def test_mixed_drafter_new_text_asks_the_model():
    async with fleet_of(ScriptedDraft([7, 8, 9])) as fleet:
        sequence = sequence_of([1, 2, 3])
        proposal = await mixed_of(fleet, sequence).propose(3)
    assert proposal.drafter == "model"
    assert proposal.draft == Draft.chain([7, 8, 9])


async def test_mixed_drafter_prompt_reaches_both():
    worker = ScriptedDraft(REPEATED)
    async with fleet_of(worker) as fleet:
        drafter = mixed_of(fleet, sequence_of())
        assert not (await drafter.propose(0)).draft
        drafter.close()
    assert worker.kinds()[:2] == ["open", "propose"]
    assert list(worker.requests[1].propose.turn.tokens) == list(PROMPT)


async def test_mixed_drafter_idle_model_catches_up():
    worker = ScriptedDraft([22, 23, 50, 51, 52])
    async with fleet_of(worker) as fleet:
        sequence = sequence_of()
        drafter = mixed_of(fleet, sequence)
        assert (await drafter.propose(2)).drafter == "suffix"
        commit(sequence, 22, 23, 50)
        proposal = await drafter.propose(2)
        drafter.close()
    assert (proposal.drafter, proposal.draft) == ("model", Draft.chain([51, 52]))
    assert len(worker.requests[1].propose.turn.tokens) == len(PROMPT) + 3


async def test_mixed_drafter_wrong_suffixes_give_way():
    async with fleet_of(ScriptedDraft(REPEATED * 10)) as fleet:
        sequence = sequence_of([5, 6] * 4)
        drafter, drafted = mixed_of(fleet, sequence), []
        for other in range(100, 130):
            drafted.append((await drafter.propose(4)).drafter)
            commit(sequence, other, 5, 6, 5, 6)
    assert drafted[0] == "suffix"
    assert drafted[-1] == "model"


async def test_mixed_drafter_chooses_the_more_correct_of_both():
    """Compares one guess of the suffixes with a model that was correct, and with a model that was not."""
    for right, winner in ((True, "model"), (False, "suffix")):
        promises = Promises()
        for _ in range(40):
            promises.observe_other(Draft.chain([1, 2, 3, 4]), [1, 2, 3, 4, 5] if right else [9])
        guess = Continuation((1, 2, 3), (1.0, 0.8, 0.6))
        won = "suffix" if promises.of_index(guess) > promises.of_other(4) else "model"
        assert won == winner


def test_promises_unreached_tokens_teach_nothing():
    promises = Promises()
    before = promises.of_other(4), promises.of_index(Continuation((1, 2), (1.0, 1.0)))
    promises.observe_other(Draft.chain([1, 2, 3, 4]), [])
    promises.observe_index(Continuation((1, 2), (1.0, 1.0)), [])
    assert (promises.of_other(4), promises.of_index(Continuation((1, 2), (1.0, 1.0)))) == pytest.approx(
        before
    )
    promises.observe_index(Continuation((1, 2), (1.0, 1.0)), [1, 3])
    assert promises.of_index(Continuation((1, 2), (1.0, 1.0))) < before[1]


@pytest.mark.parametrize("rule", ["rejection", "block"])
async def test_mixed_drafter_rejection_gives_certain_probs(rule):
    async with fleet_of() as fleet:
        proposal = await mixed_of(fleet, sequence_of(verification=rule)).propose(2)
    assert proposal.draft == Draft.chain([22, 23], [SparseProbs((22,), (1.0,)), SparseProbs((23,), (1.0,))])


async def test_mixed_drafter_past_answer_serves_its_own_scope_only():
    past = PastAnswers(1000)
    async with fleet_of() as fleet:
        first = sequence_of([3])
        drafter = mixed_of(fleet, first, past)
        commit(first, *REPEATED)
        drafter.close()
        drafter.close()
        assert len(past) == len(REPEATED) + 1
        again = await mixed_of(fleet, sequence_of([12, 13]), past).propose(2)
        assert again.draft == Draft.chain([14, 15])
        with pytest.raises(WorkerLostError):  # it has nothing to say, and there is no draft worker
            await mixed_of(fleet, sequence_of([12, 13], Scope("another key", "code")), past).propose(2)


def test_mixed_row_of_any_drafter_registers_once():
    row = mixed("ngram", "suffix")
    assert (row.name, row.mixes, row.place) == ("ngram+suffix", ("ngram", "suffix"), drafter("ngram").place)
    with pytest.raises(ValueError, match=r"there is a drafter named 'model\+suffix' already"):
        register(mixed("model", "suffix"))
