"""Drafters that do not draft are judged by what the target said, which is not asked about it."""

import pytest

from gateway.events import Events
from gateway.loop.factory import LoopFactory
from gateway.loop.loop import SequenceLoop
from gateway.routing.judge import Judge
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence
from gateway.settings import GatewaySettings, Speculation
from gateway.workers.fleet import Fleet
from outrider.decoding.settings import Sampling
from outrider.drafters.registry import Place
from outrider.pace.settings import PaceSettings
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget, fleet_of
from tests.support.patience import later
from tests.support.routes import candidate

ANSWER = [*range(1, 201)]
STEP_S = 0.001  # seconds of a target step: a guess arrives a few tokens later
EAGER = PaceSettings(exploration=1.0, probe_tokens=4)
SHY = PaceSettings(exploration=0.0, probe_tokens=4)


def rounds_of(fleet: Fleet, pace: PaceSettings, drafters: tuple[str, ...], **fields: object) -> SequenceLoop:
    settings = GatewaySettings(
        model="m", tokenizer="t", drafters=drafters, drafts={"model": "model", "other": "model"}
    )
    paces = Paces(pace)
    speculation = Speculation.model_validate(fields).resolved(settings.usual_drafter, pace)
    sequence = GatewaySequence(
        (5, 6, 7),
        Sampling(max_tokens=len(ANSWER), verification=speculation.verification),
        noise_key=1,
    )
    return LoopFactory(fleet, paces, settings).of(sequence, speculation, later(60))


async def text(rounds: SequenceLoop) -> list[int]:
    return [token.id async for step in rounds.steps() for token in step.tokens]


async def test_judge_counts_a_guess_that_the_target_said() -> None:
    target, other = ScriptedTarget(ANSWER, step_s=STEP_S), ScriptedDraft(ANSWER, name="other")
    async with fleet_of(target, ScriptedDraft(ANSWER), other) as fleet:
        rounds = rounds_of(fleet, EAGER, ("model", "other"), mode="fixed", depth=2)
        assert await text(rounds) == ANSWER
    assert rounds.stats.judged["other"]["correct"] == rounds.stats.judged["other"]["reached"] > 8
    assert {*rounds.stats.drafted_by} == {"model"}
    drafted = [list(request.decode.draft.tokens) for request in target.requests]
    assert all(len(tokens) <= 2 for tokens in drafted)  # no guess was sent to it


async def test_judge_counts_wrong_guesses() -> None:
    wrong = ScriptedDraft(ANSWER, name="other", wrong=range(len(ANSWER)))
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER), wrong) as fleet:
        rounds = rounds_of(fleet, EAGER, ("model", "other"), mode="fixed", depth=2)
        assert await text(rounds) == ANSWER
    assert rounds.stats.judged["other"]["reached"] > 0 == rounds.stats.judged["other"]["correct"]


async def test_judge_counts_an_empty_guess_as_wrong() -> None:
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:  # no token occurs twice
        rounds = rounds_of(fleet, SHY, ("model", "suffix"), mode="fixed", depth=2)
        assert await text(rounds) == ANSWER
    assert rounds.stats.judged["suffix"]["reached"] > 10
    assert rounds.stats.judged["suffix"]["correct"] == 0


async def test_judge_without_exploration_asks_no_worker() -> None:
    other = ScriptedDraft(ANSWER, name="other")
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER), other) as fleet:
        factory_rounds = [rounds_of(fleet, SHY, ("model", "other"), mode="fixed") for _ in range(2)]
        for rounds in factory_rounds:
            rounds._source._route._router._watches._credit = 0.0
            assert await text(rounds) == ANSWER
    assert other.requests == []


async def test_judge_under_rejection_or_block_judges_nothing() -> None:
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        rounds = rounds_of(fleet, EAGER, ("model", "ngram"), mode="fixed", depth=2, verification="rejection")
        assert await text(rounds) == ANSWER
    assert not rounds.stats.judged


async def test_judge_never_returns_a_sequence_to_a_worker_lost_with_it() -> None:
    other = ScriptedDraft(ANSWER, name="other", lost_at=range(100))
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER), other) as fleet:
        rounds = rounds_of(fleet, EAGER, ("model", "other"), mode="fixed", depth=2)
        assert await text(rounds) == ANSWER
    assert other.kinds().count("open") == 1
    assert rounds.stats.lost_drafts == 0


async def test_judge_closes_watched_drafters() -> None:
    other = ScriptedDraft(ANSWER, name="other")
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER), other) as fleet:
        rounds = rounds_of(fleet, EAGER, ("model", "other"), mode="fixed", depth=2)
        await text(rounds)
        await other.ended.wait()
    assert other.kinds()[-1] == "close"


async def test_judge_between_two_guesses_reads_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be long."""
    looked_at = []

    def since(self: GatewaySequence, base: int) -> list[int]:
        looked_at.append(base)
        return []

    monkeypatch.setattr(GatewaySequence, "since", since)
    sequence = GatewaySequence((5, 6, 7), Sampling(), noise_key=1)
    judge = Judge(sequence, Events(), lambda candidate: 1000)
    judge.watch([candidate("other", Place.DRAFT_WORKER)])
    for token in range(20):
        sequence.generated.append(token)
        judge.on_tokens(takes_drafts=True)
    assert looked_at == []
