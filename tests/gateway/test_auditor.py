"""Audits in service: another target computes an answer again, and a difference is counted and logged."""

import logging

import pytest

from gateway import auditor as auditing
from gateway.auditor import Auditor
from gateway.sequence import GatewaySequence
from gateway.settings import AuditSettings
from outrider.decoding.settings import Sampling
from protos import generation_pb2
from tests.fakes.conversations import Cause
from tests.fakes.scripted import ScriptedTarget, fleet_of
from tests.support.grpc_calls import Context, servicer_of
from tests.support.http_calls import ANSWER
from tests.support.patience import eventually
from tests.support.receipts import PUBLISHED

COUNT = len(ANSWER)
MESSAGE = generation_pb2.GenerateRequest(text="x", sampling=generation_pb2.Sampling(max_tokens=COUNT, seed=1))


def target(margins=(), **fields) -> ScriptedTarget:
    return ScriptedTarget(ANSWER, margins=[*margins], published=PUBLISHED, **fields)


def audits_of(*targets: ScriptedTarget) -> list:
    return [
        request.audit
        for one in targets
        for request in one.requests
        if request.WhichOneof("request") == "audit"
    ]


async def outcomes(fleet, tokenizer, message=MESSAGE, fraction=1.0):
    """The counters after an answer and its audit."""
    servicer = servicer_of(fleet, tokenizer, audit={"fraction": fraction})
    await servicer.Complete(message, Context())
    counts = servicer.generation.auditor.counts
    await eventually(lambda: counts.answers.total())
    return counts


async def test_answer_is_audited_by_the_other_target(tokenizer, caplog):
    targets = target([0.0] * COUNT), target([0.0] * COUNT)
    async with fleet_of(*targets) as fleet:
        counts = await outcomes(fleet, tokenizer)
    served = next(one for one in targets if one.said)
    other = next(one for one in targets if one is not served)
    assert audits_of(served) == []
    (audit,) = audits_of(other)
    assert [*audit.turn.tokens] == [ord("x"), *ANSWER]
    assert other.requests[0].open.prompt_length == 1
    assert counts.answers == {"same": 1}
    assert (counts.tokens, counts.near_ties, counts.wrong) == (COUNT, 0, 0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_audit_that_finds_another_token_is_counted_and_logged_with_both_workers(tokenizer, caplog):
    margins = [0.0] * COUNT
    margins[3] = 0.8
    targets = target(margins), target(margins)
    async with fleet_of(*targets) as fleet:
        counts = await outcomes(fleet, tokenizer)
        addresses = [worker.address for worker in fleet.workers()]
    assert counts.answers == {"differs": 1}
    assert counts.wrong == 1
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    said = record.getMessage()
    assert "token 3 is 0.8 nats from the choice" in said
    assert all(address in said for address in addresses)


async def test_audit_tells_near_ties_apart(tokenizer):
    margins = [5e-4] + [0.0] * (COUNT - 1)
    async with fleet_of(target(margins), target(margins)) as fleet:
        counts = await outcomes(fleet, tokenizer)
    assert counts.answers == {"near-ties": 1}
    assert (counts.near_ties, counts.wrong) == (1, 0)


async def test_audit_without_another_target_is_skipped(tokenizer):
    alone = target([0.0] * COUNT)
    async with fleet_of(alone) as fleet:
        counts = await outcomes(fleet, tokenizer)
    assert counts.answers == {"skipped": 1}
    assert audits_of(alone) == []


async def test_audit_whose_target_is_lost_is_skipped(tokenizer):
    lost = [target(lost_at=[2], lost_with=Cause.FAILED) for _ in range(2)]
    sequence = answered()
    async with fleet_of(*lost) as fleet:
        auditor = Auditor(AuditSettings(fraction=1.0), fleet)
        auditor.offer(sequence)
        await eventually(lambda: auditor.counts.answers.total())
    assert auditor.counts.answers == {"skipped": 1}


def answered(**fields):
    sequence = GatewaySequence((1,), Sampling(**fields), 0, generated=[*ANSWER])
    sequence.finish_reason = "length"
    return sequence


async def test_audits_are_of_the_fraction_of_the_answers():
    draws = iter([0.1, 0.3, 0.2, 0.9])
    async with fleet_of(target([0.0] * COUNT)) as fleet:
        auditor = Auditor(AuditSettings(fraction=0.25), fleet, lambda: next(draws))
        for _ in range(4):
            auditor.offer(answered())
        await eventually(lambda: auditor.counts.answers.total() == 2)
        assert auditor.counts.answers == {"same": 2}


async def test_answers_of_other_rules_are_not_audited():
    async with fleet_of(target()) as fleet:
        auditor = Auditor(AuditSettings(fraction=1.0), fleet, lambda: pytest.fail("it is drawn"))
        auditor.offer(answered(verification="rejection"))


async def test_answers_beyond_those_that_wait_are_skipped(monkeypatch):
    monkeypatch.setattr(auditing, "WAITING", 1)
    async with fleet_of(target()) as fleet:  # it tells no margins
        auditor = Auditor(AuditSettings(fraction=1.0), fleet)
        auditor.offer(answered())
        auditor.offer(answered())
        assert auditor.counts.answers == {"skipped": 1}
        auditor.close()
