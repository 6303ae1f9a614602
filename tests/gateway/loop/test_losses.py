"""Losses of targets are counted while no token comes: a request is not opened again for ever."""

import asyncio
import logging

import grpc
import pytest

from gateway.errors import DeadlineError, GenerationFailedError
from gateway.loop import loop
from gateway.loop.factory import LoopFactory
from gateway.loop.loop import SequenceLoop
from gateway.loop.stats import Stats
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence
from gateway.settings import GatewaySettings, Speculation
from gateway.workers.fleet import Fleet
from gateway.workers.streams import WorkerInfo
from outrider.decoding.draft import MAX_NODES
from outrider.decoding.settings import Sampling
from outrider.learning.backoff import Backoff
from outrider.pace.settings import PaceSettings
from outrider.telemetry.reasons import FailureReason
from protos import rounds_pb2
from tests.fakes.conversations import Cause
from tests.fakes.scripted import TRUST, ScriptedDraft, ScriptedTarget, fleet_of

ANSWER = [*range(10, 60)]
OFF = Speculation(mode="off", drafter="model")
FIXED = Speculation.model_validate({"mode": "fixed", "depth": 2, "drafter": "model"})


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(loop, "RETRY", Backoff(4e-4, 1.0))


def rounds_of(fleet, speculation=OFF, deadline_s=60.0, max_losses=3) -> SequenceLoop:
    settings = GatewaySettings(model="m", tokenizer="t", max_losses=max_losses)
    sequence = GatewaySequence((5, 6, 7), Sampling(max_tokens=len(ANSWER)), noise_key=1)
    deadline = asyncio.get_running_loop().time() + deadline_s
    return LoopFactory(fleet, Paces(PaceSettings()), settings).of(sequence, speculation, deadline)


async def text(generated: SequenceLoop) -> list[int]:
    return [token.id async for step in generated.steps() for token in step.tokens]


@pytest.mark.parametrize("max_losses", [1, 3])
@pytest.mark.parametrize("speculation", [OFF, FIXED], ids=str)
async def test_loop_max_losses_reached_fails_with_the_reason(caplog, speculation, max_losses):
    target = ScriptedTarget(ANSWER, lost_at=range(100))
    async with fleet_of(target, ScriptedDraft(ANSWER)) as fleet:
        generated = rounds_of(fleet, speculation, max_losses=max_losses)
        with caplog.at_level(logging.ERROR), pytest.raises(GenerationFailedError) as raised:
            await text(generated)
    assert target.kinds().count("open") == max_losses
    assert generated.stats.failures == {FailureReason.LOST_TARGETS: 1}
    assert f"{max_losses} target workers were lost with this request" in str(raised.value)
    assert str(raised.value) in caplog.text


@pytest.mark.parametrize(("speculation", "request_number"), [(OFF, 2), (FIXED, 2), (FIXED, 4)], ids=str)
async def test_loop_reply_with_a_malformed_draft_loses_the_target(speculation, request_number):
    """Nothing of the reply is committed, and another target continues."""
    target, other = ScriptedTarget(ANSWER, malformed_at=(request_number,)), ScriptedTarget(ANSWER)
    async with fleet_of(target, other, ScriptedDraft(ANSWER)) as fleet:
        generated = rounds_of(fleet, speculation)
        assert await text(generated) == ANSWER
        suspects = [link.worker.role for link in fleet.links() if link.suspect_until > 0.0]
    assert [worker.kinds().count("open") for worker in (target, other)] == [1, 1]
    assert generated.stats.lost_targets == 1
    assert suspects == ["target"]
    assert not generated.stats.failures


MALFORMED = {
    "no tree": {"tokens": [1], "parents": [1]},
    "unknown token": {"tokens": [256], "parents": [-1]},
    "too many nodes": {"tokens": [1] * (MAX_NODES + 1), "parents": range(-1, MAX_NODES)},
    "probabilities": {
        "tokens": [1],
        "parents": [-1],
        "draft_probs": [rounds_pb2.SparseProbs(token_ids=[1], probs=[1.0])],
    },
}


@pytest.mark.parametrize("draft", MALFORMED.values(), ids=MALFORMED)
async def test_loop_reply_with_an_unknown_token_loses_the_target(draft):
    """The next turn would carry the Draft, and end the request."""
    malformed = rounds_pb2.Draft(**draft)
    target, other = ScriptedTarget(ANSWER, malformed_at=(2,), malformed=malformed), ScriptedTarget(ANSWER)
    async with fleet_of(target, other) as fleet:
        generated = rounds_of(fleet)
        assert await text(generated) == ANSWER
    assert [worker.kinds().count("open") for worker in (target, other)] == [1, 1]
    assert generated.stats.lost_targets == 1


async def test_loop_malformed_drafts_again_and_again_fail():
    target = ScriptedTarget(ANSWER, malformed_at=range(100))
    async with fleet_of(target) as fleet:
        generated = rounds_of(fleet, max_losses=2)
        with pytest.raises(GenerationFailedError, match="the Draft is malformed: parents"):
            await text(generated)
    assert target.kinds().count("open") == 2
    assert generated.stats.failures == {FailureReason.LOST_TARGETS: 1}


async def test_loop_token_between_losses_resets_the_count():
    """Each opening takes two requests, and plain decoding continues after the second."""
    target = ScriptedTarget(ANSWER, lost_at=(2, 4, 7, 9, 12, 14), step_s=1e-4)
    target.answer = ANSWER
    async with fleet_of(target) as fleet:
        generated = rounds_of(
            fleet, Speculation.model_validate({"mode": "fixed", "depth": 2, "drafter": "ngram"})
        )
        assert await text(generated) == ANSWER
    assert target.kinds().count("open") > 4
    assert not generated.stats.failures


async def test_loop_drained_target_is_no_loss():
    target = ScriptedTarget(ANSWER, lost_at=range(2, 20), lost_with=Cause.LEAVING)
    async with fleet_of(target) as fleet:
        generated = rounds_of(fleet)
        assert await text(generated) == ANSWER
    assert target.kinds().count("open") == 10
    assert not generated.stats.failures


async def test_loop_target_that_never_opened_is_no_loss():
    """No process listens at that address any more: the table is a second late."""
    gone = WorkerInfo("target", "m", "127.0.0.1:1", 1, "node", 256, 2048)
    fleet = Fleet(lambda: [gone], TRUST)
    generated = rounds_of(fleet, deadline_s=1.0)
    with pytest.raises(DeadlineError):
        await text(generated)
    assert not generated.stats.failures
    await fleet.close()


class Killed:
    """Worker that a turn kills, with all answers that have not left."""

    killed = 0

    async def Stream(self, requests, context):  # noqa: N802
        async for several in requests:
            if {"decode", "propose"} & {request.WhichOneof("request") for request in several.requests}:
                self.killed += 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "killed by the script")
            opened = [
                rounds_pb2.Opened(sequence=request.sequence, epoch=request.epoch)
                for request in several.requests
                if request.HasField("open")
            ]
            await context.write(self.replies(opened=opened))


class KilledTarget(Killed, ScriptedTarget):
    replies = rounds_pb2.TargetReplies


class KilledDraft(Killed, ScriptedDraft):
    replies = rounds_pb2.DraftReplies


class ReadOpening(ScriptedTarget):
    """Ends so many streams after their first message, before it acknowledges the opening."""

    streams = 0

    def __init__(self, lost: int, status: grpc.StatusCode) -> None:
        """lost: number of the streams."""
        super().__init__(ANSWER)
        self._lost = lost
        self._status = status

    async def Stream(self, requests, context):  # noqa: N802
        self.streams += 1
        if self.streams > self._lost:
            await super().Stream(requests, context)
            return
        await anext(aiter(requests))
        if self._status is not grpc.StatusCode.OK:
            await context.abort(self._status, "lost by the script")


@pytest.mark.parametrize("max_losses", [1, 3])
@pytest.mark.parametrize("speculation", [OFF, FIXED], ids=str)
async def test_loop_target_lost_by_a_turn_before_its_acknowledgement_counts(speculation, max_losses):
    target = KilledTarget(ANSWER)
    async with fleet_of(target, ScriptedDraft(ANSWER)) as fleet:
        generated = rounds_of(fleet, speculation, deadline_s=10.0, max_losses=max_losses)
        with pytest.raises(GenerationFailedError, match=f"{max_losses} target workers were lost"):
            await text(generated)
    assert target.killed == max_losses


async def test_loop_targets_lost_with_the_opening_alone_are_no_losses():
    """A turn follows the first opening at once. Later openings go alone, and cannot be the reason."""
    target = ReadOpening(6, grpc.StatusCode.UNAVAILABLE)
    async with fleet_of(target) as fleet:
        generated = rounds_of(fleet, max_losses=2)
        assert await text(generated) == ANSWER
    assert target.streams == 7
    assert generated.stats.lost_targets == 1
    assert not generated.stats.failures


async def test_loop_stream_that_ends_in_order_is_no_loss():
    """A drained target does not read openings that cross the end of its stream."""
    target = ReadOpening(3, grpc.StatusCode.OK)
    async with fleet_of(target) as fleet:
        generated = rounds_of(fleet, max_losses=1)
        assert await text(generated) == ANSWER
    assert not generated.stats.failures


async def test_loop_engine_failure_fails_at_once():
    target = ScriptedTarget(ANSWER, lost_at=(2,), lost_with=Cause.FAILED)
    async with fleet_of(target) as fleet:
        generated = rounds_of(fleet)
        with pytest.raises(GenerationFailedError, match="lost by the script"):
            await text(generated)
        (link,) = fleet.links()
        assert link.suspect_until == 0.0  # the worker is well
    assert generated.stats.failures == {FailureReason.ENGINE: 1}
    assert target.kinds().count("open") == 1


async def test_source_draft_workers_lost_before_their_acknowledgement_count(monkeypatch):
    monkeypatch.setattr("gateway.loop.drafter_health.RECOVERY", Backoff(1e-4, 30.0))
    target, draft = ScriptedTarget(ANSWER, step_s=0.01), KilledDraft(ANSWER)
    async with fleet_of(target, draft) as fleet:
        assert await text(rounds_of(fleet, FIXED)) == ANSWER
    assert draft.killed == 3


@pytest.mark.parametrize("cause", [None, Cause.FAILED])
async def test_source_three_lost_workers_end_drafting(monkeypatch, cause):
    monkeypatch.setattr("gateway.loop.drafter_health.RECOVERY", Backoff(1e-4, 30.0))
    target = ScriptedTarget(ANSWER, step_s=0.01)
    draft = ScriptedDraft(ANSWER, lost_at=range(100), lost_with=cause)
    async with fleet_of(target, draft) as fleet:
        assert await text(rounds_of(fleet, FIXED)) == ANSWER
    assert draft.kinds().count("open") == 3


def test_stats_failures_of_several_answers_add_up():
    total, one = Stats(), Stats()
    one.failures[FailureReason.ENGINE] += 1
    total.add(one)
    total.add(one)
    assert total.failures == {FailureReason.ENGINE: 2}
