"""What a worker answers on a gateway's stream: rounds, plain stretches, fences; nothing is left behind."""

import grpc
import pytest

from outrider.engine.loop.engine import Engine
from protos import rounds_pb2
from tests.support.messages import (
    PROMPT,
    all_closed,
    draft_stream,
    end,
    opening,
    plain,
    plain_text,
    target_stream,
    turn,
    verify,
)


async def test_verdict_accepts_the_tokens_of_plain_decoding_and_adds_a_token(channel) -> None:
    text = await plain_text(channel)
    call = await target_stream(channel, opening())
    await call.write(verify(turn(1, 0, PROMPT)))
    first = await call.read()
    assert (list(first.tokens), list(first.accepted)) == (text[:1], [])
    wrong = (text[3] + 1) % 256
    await call.write(verify(turn(2, len(PROMPT), text[:1]), text[1], text[2], wrong))
    second = await call.read()
    assert list(second.tokens) == text[1:4]
    assert list(second.accepted) == [0, 1]
    assert second.round == 2
    assert second.timings.forward_ns > 0
    assert second.load.free_blocks > 0
    await end(call)


async def test_stream_verify_during_plain_decoding_keeps_what_was_decoded_by_then(channel) -> None:
    text = await plain_text(channel)
    call = await target_stream(channel, opening())
    await call.write(plain(turn(1, 0, PROMPT), len(PROMPT) + 20))
    reply = await call.read()
    await call.write(verify(turn(2, len(PROMPT), text[:3]), text[3], text[4]))
    decoded = []
    while reply.round < 2:
        decoded += reply.tokens
        reply = await call.read()
    assert decoded == text[: len(decoded)]
    # Plain decoding may have passed the turn's base before the Draft came: the Verdict begins behind it.
    begin = max(3, len(decoded))
    assert list(reply.tokens) == text[begin : begin + len(reply.tokens)]
    assert begin + len(reply.tokens) >= 6
    await end(call)


async def test_extension_is_verified_only_if_its_verdict_was_foreseen(channel) -> None:
    text = await plain_text(channel)
    call = await target_stream(channel, opening())
    await call.write(verify(turn(1, 0, PROMPT), text[0], text[1]))
    await call.write(verify(turn(1, len(PROMPT), []), *text[:5]))
    assert list((await call.read()).tokens) == text[:3]
    continued = await call.read()
    assert (continued.round, list(continued.tokens)) == (1, text[3:6])
    wrong = (text[6] + 1) % 256
    await call.write(verify(turn(2, len(PROMPT), text[:6]), wrong))
    await call.write(verify(turn(2, len(PROMPT) + 6, []), wrong, text[7], text[8]))
    assert list((await call.read()).tokens) == text[6:7]
    await call.write(verify(turn(3, len(PROMPT) + 6, text[6:7])))
    assert (await call.read()).round == 3
    await end(call)


async def test_draft_of_an_older_round_does_not_reach_the_engine(channel) -> None:
    """The engine would end the sequence: the older turn has a base that lies beyond it."""
    text = await plain_text(channel)
    call = await target_stream(channel, opening())
    await call.write(verify(turn(2, 0, PROMPT)))
    assert (await call.read()).round == 2
    await call.write(verify(turn(1, 2 * len(PROMPT), []), text[1]))
    await call.write(verify(turn(3, len(PROMPT), text[:1]), text[1]))
    reply = await call.read()
    assert (reply.round, list(reply.tokens)) == (3, text[1:3])
    await end(call)


async def test_plain_decoding_continues_when_its_lease_is_extended(channel) -> None:
    text = await plain_text(channel)
    call = await target_stream(channel, opening())
    await call.write(plain(turn(1, 0, PROMPT), len(PROMPT) + 2))
    said = [(await call.read()).tokens[0] for _ in range(2)]
    await call.write(plain(turn(1, len(PROMPT), said), len(PROMPT) + 4))
    said += [(await call.read()).tokens[0] for _ in range(2)]
    assert said == text[:4]
    await end(call)


async def test_sequence_reopened_from_its_tokens_continues_its_text(channel) -> None:
    text = await plain_text(channel)
    call = await target_stream(channel, opening())
    await call.write(plain(turn(9, 0, [*PROMPT, *text[:10]]), len(PROMPT) + 24))
    rest = [token for _ in range(14) for token in (await call.read()).tokens]
    assert rest == text[10:]
    await end(call)


async def test_draft_worker_with_the_model_of_the_target_guesses_every_token(channel) -> None:
    text = await plain_text(channel)
    call = await draft_stream(channel, opening())
    for round_number, start in ((1, 0), (2, 5)):
        base = 0 if round_number == 1 else len(PROMPT)
        tokens = PROMPT if round_number == 1 else text[:start]
        propose = rounds_pb2.Propose(turn=turn(round_number, base, tokens), depth=4)
        await call.write(rounds_pb2.DraftWorkerRequest(propose=propose))
        reply = await call.read()
        assert reply.round == round_number
        assert list(reply.proposed.draft.tokens) == text[start : start + 4]
    await call.write(rounds_pb2.DraftWorkerRequest(close=rounds_pb2.Close()))
    assert await call.half_close() == grpc.StatusCode.OK


async def test_closing_and_cancelling_both_free_the_sequence(channel, engine: Engine) -> None:
    await plain_text(channel)
    await all_closed(engine)
    call = await target_stream(channel, opening())
    await call.write(plain(turn(1, 0, PROMPT), len(PROMPT) + 24))
    await call.read()
    call.cancel()
    await all_closed(engine)
    assert engine.load().running == 0


@pytest.mark.parametrize(
    ("opened", "request_", "named"),
    [
        (opening(), verify(turn(1, 0, PROMPT), epoch=7), "epoch=7"),
        (opening(), verify(turn(1, 0, PROMPT), sequence=8), "sequence=8"),
        (opening(), plain(turn(1, 0, PROMPT), 3), "until=3 of the lease"),
        (opening(), verify(turn(1, 3, PROMPT)), "base=3"),
        (opening(), verify(turn(1, 0, PROMPT[:2])), "must cover the prompt"),
        (opening(logit_bias={9999: 1.0}), verify(turn(1, 0, PROMPT)), "logit_bias"),
    ],
)
async def test_wrong_message_ends_its_own_sequence_only(channel, opened, request_, named: str) -> None:
    text = await plain_text(channel)
    call = await target_stream(channel, opened)
    beside = rounds_pb2.TargetWorkerRequest(sequence=5, epoch=1)
    beside.open.CopyFrom(opening())
    await call.write(beside)
    await call.write(request_)
    end = await call.ended()
    assert end.cause == rounds_pb2.SequenceEnded.INVALID
    assert named in end.details
    await call.write(verify(turn(1, 0, PROMPT), *text[:2], sequence=5, epoch=1))
    [reply] = (await call.told(5)).replies
    assert list(reply.tokens) == text[:3]
    call.cancel()
    assert await plain_text(channel) == text


async def test_stream_that_begins_without_open_is_refused(channel) -> None:
    call = await target_stream(channel, opening())
    await call.write(verify(turn(1, 0, PROMPT), sequence=3, epoch=1))
    end = await call.ended()
    assert (end.sequence, end.epoch, end.cause) == (3, 1, rounds_pb2.SequenceEnded.INVALID)
    assert "first message must be Open" in end.details


async def test_sequence_is_opened_once(channel, engine: Engine) -> None:
    call = await target_stream(channel, opening())
    await call.write(rounds_pb2.TargetWorkerRequest(open=opening()))
    end = await call.ended()
    assert end.cause == rounds_pb2.SequenceEnded.INVALID
    assert "open already" in end.details
    await all_closed(engine)
    call.cancel()


async def test_sequences_of_one_message_share_a_step_and_its_message(channel) -> None:
    text = await plain_text(channel)
    call = await target_stream(channel, opening())
    numbers = range(1, 9)
    opened = [rounds_pb2.TargetWorkerRequest(sequence=number, open=opening()) for number in numbers]
    await call.write(*opened, *(verify(turn(1, 0, PROMPT), *text[:3], sequence=number) for number in numbers))
    told = await call.told(1)
    assert {reply.sequence for reply in told.replies} == {*numbers}
    assert {reply.timings.last_step.number for reply in told.replies} == {
        told.replies[0].timings.last_step.number
    }
    assert all(list(reply.tokens) == text[:4] for reply in told.replies)
    call.cancel()


async def test_end_of_a_stream_frees_all_its_sequences(channel, engine: Engine) -> None:
    call = await target_stream(channel, opening())
    numbers = range(1, 9)
    opened = [rounds_pb2.TargetWorkerRequest(sequence=number, open=opening()) for number in numbers]
    work = [verify(turn(1, 0, PROMPT), sequence=number) for number in numbers]
    await call.write(*opened, *work, plain(turn(1, 0, PROMPT), len(PROMPT) + 24))
    assert await call.read()
    assert len(engine._sequences) == 9
    call.cancel()
    await all_closed(engine)
