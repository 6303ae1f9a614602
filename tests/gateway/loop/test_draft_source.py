"""Drafts of a sequence and recovery of its drafter, seen from the rounds it goes through."""

import asyncio
import sys
from dataclasses import replace

import pytest

from gateway.loop import drafter_health
from gateway.loop.factory import LoopFactory
from gateway.proposal import Proposal
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence, Origin
from gateway.settings import GatewaySettings, Speculation
from outrider.decoding.draft import Draft
from outrider.decoding.settings import Sampling
from outrider.learning.backoff import Backoff
from outrider.pace import exploration
from outrider.pace.acceptance import SequenceAcceptance
from outrider.pace.controller import Pace
from outrider.pace.settings import PaceSettings
from outrider.pace.tuning import TUNING
from protos import rounds_pb2
from tests.fakes.conversations import EndedError
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget, fleet_of
from tests.support.patience import LIMIT_S, eventually, later

ANSWER = [*range(250)]
ANSWER_LENGTH = len(ANSWER)
ON = PaceSettings(policy="thresholds")
STEP_S = 0.002  # long enough for a Draft to come within a few tokens
OFF = PaceSettings(policy="thresholds", off_from=0)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(drafter_health, "RECOVERY", Backoff(0.001, 30.0))


def rounds_of(fleet, paces, max_tokens=ANSWER_LENGTH, **fields):
    fields = {"mode": "auto", **fields}
    speculation = Speculation.model_validate(fields).resolved("model", paces.settings)
    sampling = Sampling(max_tokens=max_tokens, verification=speculation.verification)
    sequence = GatewaySequence((5, 6, 7), sampling, noise_key=1)
    settings = GatewaySettings(model="m", tokenizer="t", target_drafters=("eagle3",))
    return sequence, LoopFactory(fleet, paces, settings).of(sequence, speculation, later(60))


async def answer(fleet, paces, **fields):
    sequence, rounds = rounds_of(fleet, paces, **fields)
    async for _ in rounds.steps():
        pass
    assert sequence.generated == ANSWER
    return rounds.stats


async def test_source_good_drafts_are_used():
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        stats = await answer(fleet, Paces(ON))
    assert stats.target_passes < len(ANSWER) / 3


async def test_source_bad_drafts_end_rounds_and_cost_the_target_nothing():
    target = ScriptedTarget(ANSWER)
    async with fleet_of(target, ScriptedDraft(ANSWER, wrong=range(len(ANSWER)))) as fleet:
        stats = await answer(fleet, Paces(ON))
    assert stats.rounds < 10
    assert stats.target_passes == len(ANSWER)


async def test_source_correct_guesses_bring_rounds_back():
    """Plain decoding verifies nothing: the text itself judges the guesses."""
    draft = ScriptedDraft(ANSWER, wrong=range(60))
    async with fleet_of(ScriptedTarget(ANSWER), draft) as fleet:
        stats = await answer(fleet, Paces(ON))
    assert stats.accepted > 50


async def test_plain_tokens_before_a_draft_arrives_are_kept():
    target, draft = ScriptedTarget(ANSWER, step_s=STEP_S), ScriptedDraft(ANSWER, wrong=range(60))
    async with fleet_of(target, draft) as fleet:
        stats = await answer(fleet, Paces(ON))
    assert stats.transitions["on", "thresholds"] > 0
    assert stats.tokens == target.said == len(ANSWER)


async def test_plain_answer_that_ends_before_the_draft_arrives_is_complete():
    target, draft = ScriptedTarget(ANSWER, step_s=STEP_S, runs_on=True), ScriptedDraft(ANSWER, lost_at=(4,))
    async with fleet_of(target, draft) as fleet:
        sequence, rounds = rounds_of(fleet, Paces(ON), max_tokens=40, mode="fixed", depth=4)
        origins = [step.tokens[-1].origin async for step in rounds.steps()]
        await target.ended.wait()
    assert sequence.generated == ANSWER[:40]
    assert rounds.stats.tokens == target.said == 40
    assert target.kinds()[-2:] == ["verify", "close"]
    assert origins[-1] is Origin.PLAIN


class Late(ScriptedDraft):
    """A Draft takes three tokens of the target while that is in plain decoding."""

    target: ScriptedTarget

    async def turns(self, requests):
        async for request, generated in super().turns(requests):
            await eventually(lambda end=generated + 3: self.target.said >= end or not self.is_plain)
            yield request, generated

    @property
    def is_plain(self):
        return self.target.kinds()[-1:] in (["plain"], ["renew"])


async def test_round_after_plain_decoding_sends_ahead_too():
    """The target has gone on since the draft was asked, and is sent what follows all the same."""
    target, draft = ScriptedTarget(ANSWER, step_s=0.01), Late(ANSWER, lost_at=(4,), prepares=True)
    draft.target = target
    async with fleet_of(target, draft) as fleet:
        await answer(fleet, Paces(ON), mode="fixed", depth=12)
    kinds = target.kinds()
    resumed = next(
        number
        for number, request in enumerate(target.requests)
        if request.decode.draft.tokens and kinds[number - 1] in ("plain", "renew")
    )
    assert kinds[resumed + 1] == "ahead"


async def test_source_overtaken_draft_teaches_the_pace(monkeypatch):
    observed = []
    monkeypatch.setattr(SequenceAcceptance, "observe", lambda self, *guess: observed.append(guess))
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        sequence, rounds = rounds_of(fleet, Paces(ON))
        drafts = rounds._source
        with drafts.at(Pace(ON)):
            sequence.generated += ANSWER[:3]
            left = drafts.overtaken(Proposal(Draft.chain(ANSWER[:5]), len(sequence.prompt), wanted=5))
            drafts.overtaken(Proposal(Draft.chain([ANSWER[0], 0]), len(sequence.prompt), wanted=2))
    assert (left.draft.tokens, left.base, left.wanted) == (tuple(ANSWER[3:5]), len(sequence), 2)
    assert observed == [(3, 3), (1, 2)]


async def test_source_cold_drafter_at_a_trial_begins_rounds(monkeypatch):
    """A trial ends with the first question of the drafter, which was not given the prompt before."""
    monkeypatch.setattr(Pace, "may_pay", lambda self, sequence: False)
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        sequence, rounds = rounds_of(fleet, Paces(ON))
        monkeypatch.setattr(Pace, "depth", lambda self, sequence: 4)
        async for _ in rounds.steps():
            pass
    assert sequence.generated == ANSWER
    assert rounds.stats.rounds > 0


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("gone_after", range(3, 9))
@pytest.mark.parametrize("wrong", [range(0), range(len(ANSWER))], ids=["in rounds", "while plain"])
async def test_source_worker_lost_in_the_background_fails_no_request(gone_after, wrong):
    draft = ScriptedDraft(ANSWER, wrong=wrong, gone_after=[gone_after])
    async with fleet_of(ScriptedTarget(ANSWER, step_s=STEP_S), draft) as fleet:
        stats = await answer(fleet, Paces(ON))
    assert stats.lost_drafts == 1


async def test_source_depth_in_mode_auto_is_a_cap():
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        stats = await answer(fleet, Paces(ON), depth=2)
    assert max(stats.lengths) == 2


async def test_source_new_settings_reach_running_requests():
    paces = Paces(ON)
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        sequence, rounds = rounds_of(fleet, paces)
        async for step in rounds.steps():
            if len(sequence.generated) > 50:
                if paces.settings is ON:
                    verified = rounds.stats.rounds
                paces.use(OFF)
                last = step
    assert sequence.generated == ANSWER
    assert rounds.stats.rounds <= verified + 2
    assert last.tokens[-1].origin is Origin.PLAIN


async def test_source_draft_after_a_pause_is_whole():
    """The draft worker gets what it missed little by little, and its first Draft is accepted whole."""
    paces, draft = Paces(OFF), ScriptedDraft(ANSWER)
    async with fleet_of(ScriptedTarget(ANSWER, step_s=STEP_S), draft) as fleet:
        sequence, rounds = rounds_of(fleet, paces)
        async for _ in rounds.steps():
            if len(sequence.generated) > 120:
                paces.use(ON)
    assert sequence.generated == ANSWER
    full, first, last = 4, rounds.stats.rounds - rounds.stats.lengths[4], 1
    assert rounds.stats.lengths[full] > 10
    assert first <= 1 + last  # the Draft trimmed to what was still ahead, and the one that max_tokens cuts
    longest = max(
        len(request.propose.turn.tokens) for request in draft.requests if request.HasField("propose")
    )
    assert longest <= 4 * PaceSettings().probe_tokens + 8


async def test_pace_observes_each_plain_token_but_the_first(monkeypatch):
    observed = []
    monkeypatch.setattr(Pace, "observe_plain", lambda self, sequence, seconds: observed.append(seconds))
    async with fleet_of(ScriptedTarget(ANSWER, total_s=0.5), ScriptedDraft(ANSWER)) as fleet:
        await answer(fleet, Paces(OFF))
    assert observed == [0.5] * (len(ANSWER) - 1)


async def test_pace_observes_the_target_time_of_each_round(monkeypatch):
    observed = []
    monkeypatch.setattr(Pace, "observe_round", lambda self, *round: observed.append(round[3].target_s))
    async with fleet_of(ScriptedTarget(ANSWER, total_s=0.5), ScriptedDraft(ANSWER)) as fleet:
        stats = await answer(fleet, Paces(ON))
    assert observed == [0.5] * stats.rounds


async def test_pace_observes_the_worker_of_a_draft(monkeypatch):
    observed = set()
    monkeypatch.setattr(Pace, "observe_round", lambda self, sequence, *_: observed.add(sequence.worker))
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        await answer(fleet, Paces(ON))
        (draft,) = (worker for worker in fleet.workers() if worker.role == "draft")
    assert observed == {draft.address}


@pytest.mark.parametrize("fields", [{}, {"mode": "fixed", "depth": 4}], ids=["auto", "fixed"])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
async def test_source_silent_drafter_is_seldom_asked(fields, rule):
    """A draft worker whose context or cache is full sends empty Drafts."""
    target, draft = ScriptedTarget(ANSWER), ScriptedDraft(ANSWER, known=range(20))
    async with fleet_of(target, draft) as fleet:
        stats = await answer(fleet, Paces(ON), verification=rule, **fields)
    assert stats.accepted > 10
    assert draft.kinds().count("propose") < 25
    assert target.kinds().count("verify") < 20
    assert stats.transitions["off", "empty Drafts"] == 1
    assert stats.empty_drafts == stats.fallbacks == 1


async def test_source_silent_drafter_that_drafts_again_is_used():
    draft = ScriptedDraft(ANSWER, known=[*range(20), *range(60, len(ANSWER))])
    async with fleet_of(ScriptedTarget(ANSWER, step_s=STEP_S), draft) as fleet:
        stats = await answer(fleet, Paces(ON), mode="fixed", depth=4)
    assert stats.accepted > 100


@pytest.mark.parametrize("policy", [ON, OFF], ids=["rounds", "probes"])
async def test_source_ngrams_without_repeats_stay_silent_until_a_repeat(monkeypatch, policy):
    repeated = [*range(100), *[7, 8, 9] * 50]
    monkeypatch.setattr(sys.modules[__name__], "ANSWER", repeated)
    target = ScriptedTarget(repeated, step_s=0.0005)
    async with fleet_of(target) as fleet:
        stats = await answer(fleet, Paces(policy), drafter="ngram")
    assert target.kinds().count("verify") < 60
    assert (stats.accepted > 50) is (policy is ON)
    assert stats.empty_drafts == 0


async def test_source_rejection_probes_by_rounds():
    draft = ScriptedDraft(ANSWER, wrong=range(len(ANSWER)))
    async with fleet_of(ScriptedTarget(ANSWER, step_s=STEP_S), draft) as fleet:
        stats = await answer(fleet, Paces(ON), verification="rejection")
    assert stats.rounds > 3


async def test_source_rejection_with_a_waiting_guess_goes_on_in_rounds_that_pay():
    """The round that would have judged the guess is not needed any more."""
    paces, draft = Paces(OFF), ScriptedDraft(ANSWER)
    async with fleet_of(ScriptedTarget(ANSWER, step_s=STEP_S), draft) as fleet:
        sequence, rounds = rounds_of(fleet, paces, verification="rejection")
        async for _ in rounds.steps():
            guesses = draft.requests and draft.requests[-1].propose.depth == TUNING.probe_depth
            if paces.settings is OFF and guesses and len(sequence.generated) > 50:
                paces.use(ON)
                plain = len(sequence.generated)
    assert sequence.generated == ANSWER
    assert rounds.stats.accepted > (len(ANSWER) - plain) / 2


class SecondIsNeverThere(ScriptedDraft):
    """Answers the first Draft, with what follows it, and never the second."""

    async def _converse(self, requests):
        first = True
        async for request, generated in self.turns(requests):
            propose = request.propose
            if propose.depth and not first:
                await asyncio.Event().wait()
            first = first and not propose.depth
            yield self._reply(
                propose.turn, proposed=rounds_pb2.Proposed(draft=self._draft(generated, propose.depth))
            )
            more = self._draft(generated, 2 * propose.depth)
            yield self._reply(propose.turn, prepared=rounds_pb2.PreparedTree(draft=more))


class LeavesInPlainDecoding(ScriptedTarget):
    """Ends once, at the first turn of plain decoding."""

    has_left = False

    async def turns(self, requests):
        async for request, generated in super().turns(requests):
            if self.kinds()[-1] == "plain" and not self.has_left:
                self.has_left = True
                raise EndedError(rounds_pb2.SequenceEnded.LEAVING, "drained")
            yield request, generated


async def test_source_target_leaves_while_a_draft_is_awaited_goes_on_drafting(monkeypatch):
    """The task of that Draft is not cancelled: the next Draft waits for it."""
    is_plain = False
    monkeypatch.setattr(Pace, "may_pay", lambda self, sequence: not is_plain)
    monkeypatch.setattr(Pace, "depth", lambda self, sequence: 0 if is_plain else 4)
    target = LeavesInPlainDecoding(ANSWER)
    async with fleet_of(target, SecondIsNeverThere(ANSWER)) as fleet:
        sequence, rounds = rounds_of(fleet, Paces(PaceSettings()))
        async with asyncio.timeout(LIMIT_S):
            async for _ in rounds.steps():
                is_plain = is_plain or rounds.stats.continued > 0
    assert sequence.generated == ANSWER
    assert target.has_left


@pytest.mark.parametrize("drafter", ["eagle3", "model"])
async def test_source_settings_without_drafts_never_interrupt_plain_decoding(drafter, monkeypatch):
    """There is no trial, no round that only probes, no guess."""
    monkeypatch.setattr(exploration, "TUNING", replace(TUNING, first_trial=4))
    target, draft = Timed(ANSWER), ScriptedDraft(ANSWER)
    async with fleet_of(target, draft) as fleet:
        await answer(fleet, Paces(PaceSettings(max_depth=0)), drafter=drafter)
    assert {*target.kinds()} <= {"open", "plain", "renew", "close"}
    assert not any(request.propose.depth for request in draft.requests)


class Timed(ScriptedTarget):
    """Reports its steps, so that the pace knows what they cost."""

    def _reply(self, turn, generated, drafted):
        reply = super()._reply(turn, generated, drafted)
        step = reply.timings.last_step
        step.number, step.ns = generated + 1, 15_000_000
        step.sequences, step.tokens = 1, 1 + len(drafted)
        reply.load.decoding = 1
        return reply
