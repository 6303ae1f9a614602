"""The sequences of one gateway at a worker."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from actors.connection import frame_of
from actors.engine_client import EngineClient
from actors.gateway_sequences import GatewaySequences
from actors.messages import Close, Open, Stepped, Submit, ToEngine
from actors.translation import TRANSLATIONS
from outrider.decoding.draft import Verdict
from outrider.engine.work import Decoded, EngineLoad, Timings
from outrider.pace.step import Step, StepSize
from protos import rounds_pb2
from tests.fakes.spans import TRACEPARENT
from tests.support.messages import PROMPT, opening, turn, verify


async def told(*requests: Any) -> AsyncIterator[Any]:
    for request in requests:
        request.sequence, request.epoch = 1, 1
    yield rounds_pb2.TargetWorkerRequests(requests=requests)


async def test_opening_without_work_is_acknowledged_and_not_told_to_the_engine() -> None:
    engine = EngineClient()
    said: list[ToEngine] = []
    engine.send = said.append  # type: ignore
    sequences = GatewaySequences(TRANSLATIONS["target"], engine)
    await sequences.read(told(rounds_pb2.TargetWorkerRequest(open=opening())))
    assert [type(message) for message in sequences.outbox.flush()] == [rounds_pb2.Opened]
    assert not said
    await sequences.read(told(verify(turn(1, 0, PROMPT))))
    assert [type(message) for message in said] == [Open, Submit]
    sequences.close()
    assert [type(message) for message in said] == [Open, Submit, Close]


@pytest.mark.parametrize("at", ["before it is opened", "between opening and turn"])
async def test_turn_after_the_end_of_the_engine_is_not_refused(at: str) -> None:
    """The end of the stream says it, and the sequence goes on elsewhere. A refusal would fail its request."""
    engine = EngineClient()
    sequences = GatewaySequences(TRANSLATIONS["target"], engine)
    if at == "between opening and turn":
        engine.send = lambda message: None  # type: ignore[method-assign]
        await sequences.read(told(rounds_pb2.TargetWorkerRequest(open=opening())))
        assert [type(message) for message in sequences.outbox.flush()] == [rounds_pb2.Opened]
    engine.connection_lost(None)
    if at == "before it is opened":
        await sequences.read(told(rounds_pb2.TargetWorkerRequest(open=opening())))
    await sequences.read(told(verify(turn(1, 0, PROMPT))))
    assert sequences.outbox.flush() == []


async def test_gateway_sequences_closed_record_the_spans_of_their_last_answers(spans) -> None:
    """The process of a drained worker ends before their delay is over."""
    engine = EngineClient()
    engine.send = lambda message: None  # type: ignore[method-assign]
    sequences = GatewaySequences(TRANSLATIONS["target"], engine)
    asked = verify(rounds_pb2.Turn(round=1, base=0, tokens=PROMPT, traceparent=TRACEPARENT))
    await sequences.read(told(rounds_pb2.TargetWorkerRequest(open=opening()), asked))
    timings = Timings(
        0.001, 0.002, 0.0005, 0.003, 0.005, Step(1, StepSize(1, 1), 0.003), steps=1, preemptions=0
    )
    verdict = Decoded(0, 1, Verdict((), (7,)), (), "length", timings, len(PROMPT) + 1)
    answered = Stepped((verdict,), (1,), EngineLoad(1, 1, 0, 5, 9), 10**18, ())
    engine.data_received(frame_of([answered]))
    assert not spans.named("verify")
    sequences.close()
    assert len(spans.named("verify")) == 1


async def answered_after(opened: rounds_pb2.Open, *results: Decoded, tokens: list[int]) -> EngineClient:
    """Returns the client of an engine that answers the first turn of a sequence with these results."""
    engine = EngineClient()
    engine.send = lambda message: None  # type: ignore[method-assign]
    sequences = GatewaySequences(TRANSLATIONS["target"], engine)
    asked = verify(turn(1, 0, tokens))
    await sequences.read(told(rounds_pb2.TargetWorkerRequest(open=opened), asked))
    for result in results:
        engine.data_received(frame_of([Stepped((result,), (1,), EngineLoad(1, 1, 0, 5, 9), 10**18, ())]))
    return engine


def decoded(token: int, length: int) -> Decoded:
    timings = Timings(0.0, 0.0, 0.0, 0.0, 0.0, Step(1, StepSize(1, 1), 0.003), steps=1, preemptions=0)
    return Decoded(0, 1, Verdict((), (token,)), (), None, timings, length)


async def test_first_token_of_a_new_sequence_is_timed_once() -> None:
    before = time.perf_counter()
    answers = [decoded(7, len(PROMPT) + 1), decoded(8, len(PROMPT) + 2)]
    engine = await answered_after(opening(), *answers, tokens=PROMPT)
    assert 0.0 < engine.first_tokens.tail() <= time.perf_counter() - before
    assert len(engine.first_tokens._times) == 1


async def test_first_token_counts_the_time_in_the_gateways_queue() -> None:
    opened = opening()
    opened.queued_ms = 5000
    engine = await answered_after(opened, decoded(7, len(PROMPT) + 1), tokens=PROMPT)
    assert 5.0 < engine.first_tokens.tail() < 10.0


async def test_first_token_of_a_sequence_that_was_begun_elsewhere_is_not_timed() -> None:
    answer = decoded(8, len(PROMPT) + 2)
    engine = await answered_after(opening(), answer, tokens=[*PROMPT, 7])
    assert engine.first_tokens.tail() == 0.0
