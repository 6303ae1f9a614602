"""When a sequence has Drafts, seen from the rounds it goes through."""

import asyncio
import sys
from dataclasses import replace

import pytest

from gateway.loop import draft_source
from gateway.loop.factory import LoopFactory
from gateway.proposal import Proposal
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence, Origin
from gateway.settings import GatewaySettings, Speculation
from outrider.decoding.draft import Draft
from outrider.decoding.settings import Sampling
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
    monkeypatch.setattr(draft_source, "SHORTEST_PAUSE_S", 0.001)


def rounds_of(fleet, paces, max_tokens=ANSWER_LENGTH, **fields):
    fields = {"mode": "auto", **fields}
    speculation = Speculation.model_validate(fields).resolved("model", paces.settings)
    sampling = Sampling(max_tokens=max_tokens, verification=speculation.verification)
    sequence = GatewaySequence((5, 6, 7), sampling, noise_key=1)
    settings = GatewaySettings(model="m", tokenizer="t", beside_target="eagle3")
    return sequence, LoopFactory(fleet, paces, settings).of(sequence, speculation, later(60))


async def answer(fleet, paces, **fields):
    sequence, rounds = rounds_of(fleet, paces, **fields)
    async for _ in rounds.steps():
        pass
    assert sequence.generated == ANSWER
    return rounds.stats


async def test_good_drafts_are_used():
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        stats = await answer(fleet, Paces(ON))
    assert stats.target_passes < len(ANSWER) / 3


async def test_bad_drafts_are_given_up_and_the_target_pays_nothing_for_those_that_are_only_compared():
    target = ScriptedTarget(ANSWER)
    async with fleet_of(target, ScriptedDraft(ANSWER, wrong=range(len(ANSWER)))) as fleet:
        stats = await answer(fleet, Paces(ON))
    assert stats.rounds < 10
    assert stats.target_passes == len(ANSWER)


async def test_drafts_come_back_once_guesses_prove_right_again():
    """Nobody verifies while the sequence is plain: the text itself tells."""
    draft = ScriptedDraft(ANSWER, wrong=range(60))
    async with fleet_of(ScriptedTarget(ANSWER), draft) as fleet:
        stats = await answer(fleet, Paces(ON))
    assert stats.accepted > 50


async def test_what_the_target_decodes_by_itself_before_it_sees_a_draft_stands():
    target, draft = ScriptedTarget(ANSWER, step_s=STEP_S), ScriptedDraft(ANSWER, wrong=range(60))
    async with fleet_of(target, draft) as fleet:
        stats = await answer(fleet, Paces(ON))
    assert stats.transitions["on", "thresholds"] > 0
    assert stats.tokens == target.said == len(ANSWER)


async def test_an_answer_may_end_before_the_target_sees_the_draft():
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
    """While the target decodes by itself a Draft takes three of its tokens."""

    target: ScriptedTarget

    async def turns(self, requests):
        async for request, generated in super().turns(requests):
            await eventually(lambda end=generated + 3: self.target.said >= end or not self.is_plain)
            yield request, generated

    @property
    def is_plain(self):
        return self.target.kinds()[-1:] in (["plain"], ["top_up"])


async def test_what_follows_a_draft_that_ends_plain_decoding_is_sent_ahead_too():
    """Though the target has gone on since the draft was asked."""
    target, draft = ScriptedTarget(ANSWER, step_s=0.01), Late(ANSWER, lost_at=(4,), prepares=True)
    draft.target = target
    async with fleet_of(target, draft) as fleet:
        await answer(fleet, Paces(ON), mode="fixed", depth=12)
    kinds = target.kinds()
    resumed = next(
        number
        for number, request in enumerate(target.requests)
        if request.verify.draft.tokens and kinds[number - 1] in ("plain", "top_up")
    )
    assert kinds[resumed + 1] == "extend"


async def test_the_pace_hears_how_good_a_draft_was_that_came_too_late(monkeypatch):
    told = []
    monkeypatch.setattr(SequenceAcceptance, "observe", lambda self, *guess: told.append(guess))
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        sequence, rounds = rounds_of(fleet, Paces(ON))
        drafts = rounds._source
        with drafts.at(Pace(ON)):
            sequence.generated += ANSWER[:3]
            left = drafts.overtaken(Proposal(Draft.chain(ANSWER[:5]), len(sequence.prompt), wanted=5))
            drafts.overtaken(Proposal(Draft.chain([ANSWER[0], 0]), len(sequence.prompt), wanted=2))
    assert (left.draft.tokens, left.base, left.wanted) == (tuple(ANSWER[3:5]), len(sequence), 2)
    assert told == [(3, 3), (1, 2)]


async def test_rounds_may_begin_where_the_first_turn_was_to_be_plain(monkeypatch):
    """A trial that ends with its first question: the drafter has not been given the prompt before."""
    monkeypatch.setattr(Pace, "may_pay", lambda self, sequence: False)
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        sequence, rounds = rounds_of(fleet, Paces(ON))
        monkeypatch.setattr(Pace, "depth", lambda self, sequence: 4)
        async for _ in rounds.steps():
            pass
    assert sequence.generated == ANSWER
    assert rounds.stats.rounds > 0


@pytest.mark.parametrize("gone_after", range(3, 9))
@pytest.mark.parametrize("wrong", [range(0), range(len(ANSWER))], ids=["in rounds", "while plain"])
async def test_a_draft_worker_that_goes_while_nobody_waits_for_it_fails_no_request(gone_after, wrong):
    draft = ScriptedDraft(ANSWER, wrong=wrong, gone_after=[gone_after])
    async with fleet_of(ScriptedTarget(ANSWER, step_s=STEP_S), draft) as fleet:
        stats = await answer(fleet, Paces(ON))
    assert stats.lost_drafts == 1


async def test_a_depth_under_mode_auto_is_a_cap():
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        stats = await answer(fleet, Paces(ON), depth=2)
    assert max(stats.accepted_lengths) == 2


async def test_settings_that_change_take_hold_of_running_requests():
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


async def test_after_a_pause_drafts_are_as_good_as_without_one():
    """The draft worker is told what it missed little by little, and its first Draft stands whole."""
    paces, draft = Paces(OFF), ScriptedDraft(ANSWER)
    async with fleet_of(ScriptedTarget(ANSWER, step_s=STEP_S), draft) as fleet:
        sequence, rounds = rounds_of(fleet, paces)
        async for _ in rounds.steps():
            if len(sequence.generated) > 120:
                paces.use(ON)
    assert sequence.generated == ANSWER
    full, first, last = 4, rounds.stats.rounds - rounds.stats.accepted_lengths[4], 1
    assert rounds.stats.accepted_lengths[full] > 10
    assert first <= 1 + last  # the Draft trimmed to what was still ahead, and the one that max_tokens cuts
    longest = max(
        len(request.propose.turn.tokens) for request in draft.requests if request.HasField("propose")
    )
    assert longest <= 4 * PaceSettings().probe_tokens + 8


async def test_the_pace_hears_how_long_each_plain_token_took_but_the_first(monkeypatch):
    told = []
    monkeypatch.setattr(Pace, "observe_plain", lambda self, sequence, seconds: told.append(seconds))
    async with fleet_of(ScriptedTarget(ANSWER, total_s=0.5), ScriptedDraft(ANSWER)) as fleet:
        await answer(fleet, Paces(OFF))
    assert told == [0.5] * (len(ANSWER) - 1)


async def test_the_pace_hears_how_long_the_target_had_each_round(monkeypatch):
    told = []
    monkeypatch.setattr(Pace, "observe_round", lambda self, *observed: told.append(observed[3].target_s))
    async with fleet_of(ScriptedTarget(ANSWER, total_s=0.5), ScriptedDraft(ANSWER)) as fleet:
        stats = await answer(fleet, Paces(ON))
    assert told == [0.5] * stats.rounds


async def test_the_pace_hears_which_worker_made_a_draft(monkeypatch):
    told = set()
    monkeypatch.setattr(Pace, "observe_round", lambda self, sequence, *_: told.add(sequence.worker))
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        await answer(fleet, Paces(ON))
        (draft,) = (worker for worker in fleet.workers() if worker.role == "draft")
    assert told == {draft.address}


@pytest.mark.parametrize("fields", [{}, {"mode": "fixed", "depth": 4}], ids=["auto", "fixed"])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
async def test_a_draft_with_nothing_to_say_costs_next_to_nothing(fields, rule):
    """As one whose context or cache is full."""
    target, draft = ScriptedTarget(ANSWER), ScriptedDraft(ANSWER, known=range(20))
    async with fleet_of(target, draft) as fleet:
        stats = await answer(fleet, Paces(ON), verification=rule, **fields)
    assert stats.accepted > 10
    assert draft.kinds().count("propose") < 25
    assert target.kinds().count("verify") < 20
    assert stats.transitions["off", "empty Drafts"] == 1
    assert stats.empty_drafts == stats.fallbacks == 1


async def test_a_draft_that_has_something_to_say_again_is_heard():
    draft = ScriptedDraft(ANSWER, known=[*range(20), *range(60, len(ANSWER))])
    async with fleet_of(ScriptedTarget(ANSWER, step_s=STEP_S), draft) as fleet:
        stats = await answer(fleet, Paces(ON), mode="fixed", depth=4)
    assert stats.accepted > 100


@pytest.mark.parametrize("policy", [ON, OFF], ids=["rounds", "probes"])
async def test_a_text_without_repeats_is_decoded_freely_until_it_repeats_itself(monkeypatch, policy):
    repeated = [*range(100), *[7, 8, 9] * 50]
    monkeypatch.setattr(sys.modules[__name__], "ANSWER", repeated)
    target = ScriptedTarget(repeated, step_s=0.0005)
    async with fleet_of(target) as fleet:
        stats = await answer(fleet, Paces(policy), drafter="ngram")
    assert target.kinds().count("verify") < 60
    assert (stats.accepted > 50) is (policy is ON)
    assert stats.empty_drafts == 0


async def test_rejection_or_block_are_tried_by_rounds_since_the_text_cannot_tell():
    draft = ScriptedDraft(ANSWER, wrong=range(len(ANSWER)))
    async with fleet_of(ScriptedTarget(ANSWER, step_s=STEP_S), draft) as fleet:
        stats = await answer(fleet, Paces(ON), verification="rejection")
    assert stats.rounds > 3


async def test_rejection_or_block_goes_on_in_rounds_that_turn_out_to_pay_while_a_guess_waits():
    """The round that was to be tried after it is not needed any more."""
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
    """Its first Draft is, with what follows it."""

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
            yield self._reply(propose.turn, prepared=rounds_pb2.Prepared(draft=more))


class LeavesInPlainDecoding(ScriptedTarget):
    """Once."""

    has_left = False

    async def turns(self, requests):
        async for request, generated in super().turns(requests):
            if request.HasField("plain") and not self.has_left:
                self.has_left = True
                raise EndedError(rounds_pb2.Ended.LEAVING, "drained")
            yield request, generated


async def test_a_target_that_leaves_while_a_draft_is_still_waited_for_ends_no_drafting(monkeypatch):
    """Nobody cancels the task of that Draft, which whoever drafts next waits for."""
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
async def test_where_the_settings_allow_no_draft_plain_decoding_is_never_interrupted(drafter, monkeypatch):
    """No trial, no round that only probes, no guess."""
    monkeypatch.setattr(exploration, "TUNING", replace(TUNING, first_trial=4))
    target, draft = Timed(ANSWER), ScriptedDraft(ANSWER)
    async with fleet_of(target, draft) as fleet:
        await answer(fleet, Paces(PaceSettings(max_depth=0)), drafter=drafter)
    assert {*target.kinds()} <= {"open", "plain", "top_up", "close"}
    assert not any(request.propose.depth for request in draft.requests)


class Timed(ScriptedTarget):
    """Tells of its steps, so that the pace knows what they cost."""

    def _reply(self, turn, generated, drafted):
        reply = super()._reply(turn, generated, drafted)
        step = reply.timings.last_step
        step.number, step.ns = generated + 1, 15_000_000
        step.sequences, step.tokens = 1, 1 + len(drafted)
        reply.load.decoding = 1
        return reply
