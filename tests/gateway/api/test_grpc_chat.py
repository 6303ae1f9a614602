"""Chats over gRPC: the chat template writes the prompt, as for chats over HTTP."""

import grpc
import pytest

from gateway.errors import InvalidRequestError
from protos import generation_pb2
from tests.fakes.scripted import MAX_LENGTH, ScriptedTarget, fleet_of
from tests.support.grpc_calls import Context, servicer_of
from tests.support.http_calls import ANSWER, TEXT, client_of

HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}, {"role": "user"}]


def request_of(messages, **fields):
    chat = generation_pb2.TextMessages(messages=[generation_pb2.TextMessage(**each) for each in messages])
    return generation_pb2.GenerateRequest(chat=chat, **fields)


async def test_grpc_chat_is_written_by_the_template_and_answered(tokenizer):
    target = ScriptedTarget(ANSWER)
    asked = request_of(HELLO, sampling=generation_pb2.Sampling(max_tokens=len(ANSWER)))
    async with fleet_of(target) as fleet:
        chunks = [chunk async for chunk in servicer_of(fleet, tokenizer).Generate(asked, Context())]
    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert bytes(target.requests[1].decode.turn.tokens) == b"user:Hi;assistant:So;user:;"


async def test_grpc_chat_has_prompt_and_noise_of_the_chat_over_http(tokenizer):
    by_grpc, by_http = ScriptedTarget(ANSWER), ScriptedTarget(ANSWER)
    sampling = {"max_tokens": len(ANSWER), "seed": 3}
    async with fleet_of(by_grpc) as fleet:
        asked = request_of(HELLO[:1], sampling=generation_pb2.Sampling(**sampling))
        await servicer_of(fleet, tokenizer).Complete(asked, Context())
    async with client_of(tokenizer, by_http) as client:
        await client.post("/v1/chat/completions", json={"messages": HELLO[:1], **sampling})
    opened = [target.requests[0].open for target in (by_grpc, by_http)]
    assert opened[0].noise_key == opened[1].noise_key
    assert by_grpc.requests[1].decode.turn.tokens == by_http.requests[1].decode.turn.tokens


async def test_grpc_chat_without_max_tokens_may_fill_the_context(tokenizer):
    target = ScriptedTarget(ANSWER)
    async with fleet_of(target) as fleet:
        await anext(servicer_of(fleet, tokenizer).Generate(request_of(HELLO[:1]), Context()))
    assert target.requests[0].open.sampling.max_tokens == MAX_LENGTH - len(b"user:Hi;")


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages: "),
        ([{"role": "user", "content": "x"}, {"role": "nobody", "content": "x"}], "messages.1.role: "),
        ([{"content": "x"}], "messages.0.role: "),
        ([{"role": "assistant", "content": "x"}], "messages: the model's chat template refuses them"),
        ([{"role": "user", "content": "x" * MAX_LENGTH}], f"messages: {MAX_LENGTH + 6} tokens, at most"),
    ],
    ids=["none", "role", "no role", "template", "long"],
)
async def test_grpc_chat_with_a_wrong_message_is_refused_by_name(tokenizer, messages, named):
    context = Context()
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        with pytest.raises(InvalidRequestError):
            await servicer_of(fleet, tokenizer).Complete(request_of(messages), context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert context.details.startswith(named)
