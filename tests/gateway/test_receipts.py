"""Receipts of answers: at the end of each choice, of what the caller got, and refused without a key."""

import json
from typing import Any

import pytest

from gateway.errors import InvalidRequestError
from outrider.receipts.receipt import Receipt
from protos import generation_pb2
from tests.fakes.scripted import ScriptedTarget, fleet_of
from tests.support.grpc_calls import Context, servicer_of
from tests.support.http_calls import ANSWER, ASK, CHAT, TEXT, client_of, events_of
from tests.support.receipts import PUBLISHED, key, pem_of

ASKED = {"seed": 5, "temperature": 0.5, "receipt": True}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def target(**fields: Any) -> ScriptedTarget:
    return ScriptedTarget(ANSWER, published={**PUBLISHED, **fields})


def checked(told: dict[str, Any]) -> Receipt:
    receipt = Receipt.model_validate(told)
    assert receipt.is_signed_by(key().public_key())
    return receipt


async def test_receipt_says_all_that_decides_the_answer(tokenizer):
    async with client_of(tokenizer, target(), receipt_key=pem_of(key())) as client:
        answer = (await client.post(COMPLETIONS, json={**ASK, **ASKED, "top_k": 9, "logprobs": 1})).json()
    receipt = checked(answer["choices"][0]["receipt"])
    assert (receipt.model, receipt.weights, receipt.tokenizer) == ("m", "1" * 64, "2" * 64)
    assert receipt.numerics.dtype == "float32"
    assert receipt.prompt == (ord("x"),)
    assert [*receipt.answer] == ANSWER
    assert (receipt.sampling.seed, receipt.sampling.temperature, receipt.sampling.top_k) == (5, 0.5, 9)
    assert receipt.sampling.logprobs is None, "it decides no token"
    assert (receipt.choice, receipt.finish_reason) == (0, "length")


async def test_receipts_of_several_choices_are_each_of_their_own(tokenizer):
    asked = {**ASK, **ASKED, "n": 2, "prompt": ["x", "y"]}
    async with client_of(tokenizer, target(), receipt_key=pem_of(key())) as client:
        answer = (await client.post(COMPLETIONS, json=asked)).json()
    receipts = [checked(choice["receipt"]) for choice in answer["choices"]]
    assert [(receipt.prompt[0], receipt.choice) for receipt in receipts] == [
        (ord(prompt), choice) for prompt in "xy" for choice in (0, 1)
    ]


async def test_receipt_of_an_answer_that_a_stop_string_ends_has_the_told_tokens(tokenizer):
    async with client_of(tokenizer, target(), receipt_key=pem_of(key())) as client:
        fields = {**ASK, **ASKED, "stop": TEXT[8:10], "return_token_ids": True}
        (choice,) = (await client.post(COMPLETIONS, json=fields)).json()["choices"]
    receipt = checked(choice["receipt"])
    assert [*receipt.answer] == choice["token_ids"]
    assert len(receipt.answer) < len(ANSWER)
    assert (receipt.stop, receipt.finish_reason) == ((TEXT[8:10],), "stop")


@pytest.mark.parametrize(("path", "ask"), [(COMPLETIONS, ASK), (CHATS, CHAT)])
async def test_receipt_of_a_stream_comes_with_its_last_choice(tokenizer, path, ask):
    async with client_of(tokenizer, target(), receipt_key=pem_of(key())) as client:
        response = await client.post(path, json={**ask, **ASKED, "stream": True})
    choices = [json.loads(event)["choices"][0] for event in events_of(response)[:-1]]
    assert ["receipt" in choice for choice in choices] == [False] * (len(choices) - 1) + [True]
    assert [*checked(choices[-1]["receipt"]).answer] == ANSWER


async def test_receipt_of_a_chat_and_of_a_response_are_in_their_bodies(tokenizer):
    async with client_of(tokenizer, target(), receipt_key=pem_of(key())) as client:
        chat = (await client.post(CHATS, json={**CHAT, **ASKED})).json()
        fields = {"input": "x", "max_output_tokens": len(ANSWER), **ASKED}
        response = (await client.post("/v1/responses", json=fields)).json()
    for told in (chat["choices"][0]["receipt"], response["receipt"]):
        assert [*checked(told).answer] == ANSWER


async def test_receipt_over_grpc_is_json_of_each_choice(tokenizer):
    sampling = generation_pb2.Sampling(max_tokens=len(ANSWER), seed=5)
    message = generation_pb2.GenerateRequest(text="x", sampling=sampling, receipt=True)
    async with fleet_of(target()) as fleet:
        servicer = servicer_of(fleet, tokenizer, receipt_key=pem_of(key()))
        completion = await servicer.Complete(message, Context())
        chunks = [chunk async for chunk in servicer.Generate(message, Context())]
    for told in (completion.choices[0].receipt, chunks[-1].receipt):
        assert [*checked(json.loads(told)).answer] == ANSWER
    assert not any(chunk.HasField("receipt") for chunk in chunks[:-1])


async def test_answer_without_a_wish_for_a_receipt_has_none(tokenizer):
    async with client_of(tokenizer, target(), receipt_key=pem_of(key())) as client:
        (choice,) = (await client.post(COMPLETIONS, json=ASK)).json()["choices"]
    assert "receipt" not in choice


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({}, {}),
        ({"receipt_key": pem_of(key())}, {"speculation": {"verification": "rejection"}}),
        ({"receipt_key": pem_of(key())}, {"max_tokens": 0, "echo": True}),
    ],
    ids=["no key", "another rule", "no answer"],
)
async def test_receipt_that_cannot_be_made_is_refused_by_its_field(tokenizer, settings, fields):
    async with client_of(tokenizer, target(), **settings) as client:
        response = await client.post(COMPLETIONS, json={**ASK, **ASKED, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "receipt"


async def test_receipt_of_targets_with_different_weights_is_refused(tokenizer):
    async with fleet_of(target(), target(weights="3" * 64)) as fleet:
        servicer = servicer_of(fleet, tokenizer, receipt_key=pem_of(key()))
        message = generation_pb2.GenerateRequest(text="x", receipt=True)
        with pytest.raises(InvalidRequestError, match="different weights"):
            await servicer.Complete(message, Context())


async def test_health_does_not_tell_the_key_of_receipts(tokenizer):
    async with client_of(tokenizer, target(), receipt_key=pem_of(key())) as client:
        assert "PRIVATE KEY" not in (await client.get("/health")).text
