"""Several prompts in a request, and log-probabilities of prompts."""

import json

import pytest

from tests.fakes.conversations import Cause
from tests.fakes.scripted import MAX_LENGTH, ScriptedDraft, ScriptedTarget
from tests.support.http_calls import ANSWER, ASK, TEXT, client_of, events_of
from tests.support.service import service_of

SCORING = {"echo": True, "logprobs": 1, "max_tokens": 0}


@pytest.mark.parametrize("prompts", [["x", "yy"], [[120], [121, 121]]], ids=["texts", "token ids"])
async def test_completion_of_several_prompts_has_n_answers_to_each_in_order(client, prompts):
    body = (
        await client.post("/v1/completions", json={**ASK, "prompt": prompts, "n": 2, "echo": True})
    ).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == [
        f"{said}{TEXT}" for said in ("x", "x", "yy", "yy")
    ]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 4 * len(ANSWER)


async def test_prompts_stream_carries_every_answer(client):
    ask = {**ASK, "prompt": ["x", "yy"], "stream": True, "echo": True}
    *events, _ = events_of(await client.post("/v1/completions", json=ask))
    said = {0: "", 1: ""}
    for event in events:
        for choice in json.loads(event)["choices"]:
            said[choice["index"]] += choice["text"]
    assert said == {0: f"x{TEXT}", 1: f"yy{TEXT}"}


async def test_prompts_each_is_answered_as_if_alone():
    prompts = ["The cat", "def main(", '{"name": "', "The cat"]
    ask = {"max_tokens": 12, "temperature": 1, "seed": 7, "n": 2}
    async with service_of(drafts=0) as service:

        async def texts(prompt):
            body = (await service.http.post("/v1/completions", json={**ask, "prompt": prompt})).json()
            return [choice["text"] for choice in body["choices"]]

        alone = [text for prompt in prompts for text in await texts(prompt)]
        assert await texts(prompts) == alone
        assert alone[:2] == alone[-2:]
        assert len({*alone}) > 3


async def test_prompts_scored_alone_generate_no_token(tokenizer):
    target, draft = ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)
    async with client_of(tokenizer, target, draft) as client:
        body = (await client.post("/v1/completions", json={**ASK, **SCORING, "prompt": "säts"})).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("säts", "length")
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["s", "bytes:\\xc3", "bytes:\\xa4", "t", "s"]
    assert logprobs["token_logprobs"] == [None, *[-0.25] * 4]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][3:] == [{"t": -0.25, "u": -9999.0}, {"s": -0.25, "r": -9999.0}]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    assert body["usage"]["completion_tokens"] == 0
    assert target.kinds()[:2] == ["open", "score"]
    assert {*target.kinds()[2:]} <= {"close"}
    assert draft.kinds() == []


async def test_prompts_scored_keep_the_generated_text(client):
    ask = {**ASK, "prompt": ["x", "yy"], "echo": True, "logprobs": 0}
    first, second = (await client.post("/v1/completions", json=ask)).json()["choices"]
    assert second["text"] == f"yy{TEXT}"
    assert second["logprobs"]["tokens"][:4] == ["y", "y", "T", "h"]
    assert second["logprobs"]["token_logprobs"] == [None, *[-0.25] * (1 + len(ANSWER))]
    assert second["logprobs"]["text_offset"][:4] == [0, 1, 2, 3]
    assert first["logprobs"]["token_logprobs"] == [None, *[-0.25] * len(ANSWER)]
    *events, _ = events_of(await client.post("/v1/completions", json={**ask, "stream": True}))
    streamed = [json.loads(event)["choices"][0] for event in events]
    told = [chunk["logprobs"]["token_logprobs"] for chunk in streamed if chunk["index"] == 1]
    assert [value for part in told for value in part] == second["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("ask", [{}, {"stream": True}], ids=str)
async def test_echo_without_logprobs_asks_no_worker(tokenizer, ask):
    target = ScriptedTarget(ANSWER)
    async with client_of(tokenizer, target) as client:
        response = await client.post("/v1/completions", json={**ASK, **ask, "echo": True, "max_tokens": 0})
    text = events_of(response)[0] if ask.get("stream") else response.text
    assert json.loads(text)["choices"][0]["text"] == "x"
    assert target.requests == []


async def test_prompts_continue_on_another_target(tokenizer):
    target = ScriptedTarget(ANSWER, lost_at=[2], lost_with=Cause.LEAVING)
    async with client_of(tokenizer, target) as client:
        body = (await client.post("/v1/completions", json={**ASK, **SCORING, "prompt": "scored"})).json()
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, *[-0.25] * 5]


async def test_prompts_target_with_too_many_scores_counts_as_lost(tokenizer, monkeypatch):
    target, honest = ScriptedTarget(ANSWER), ScriptedTarget._scores
    lies = [True]

    def scores(self, score):
        replies = [*honest(self, score)]
        if lies:
            lies.pop()
            replies[-1].logprobs.extend([*replies[-1].logprobs])
        return replies

    monkeypatch.setattr(ScriptedTarget, "_scores", scores)
    async with client_of(tokenizer, target) as client:
        body = (await client.post("/v1/completions", json={**ASK, **SCORING, "prompt": "abc"})).json()
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]
    assert target.kinds().count("open") == 2


async def test_scores_of_a_text_are_those_with_which_it_is_generated():
    ask = {"prompt": "The cat", "max_tokens": 3, "temperature": 0, "logprobs": 2}
    async with service_of() as service:
        answered = (await service.http.post("/v1/completions", json=ask)).json()["choices"][0]
        count = len(answered["logprobs"]["tokens"])
        whole = {**ask, **SCORING, "logprobs": 2, "prompt": ask["prompt"] + answered["text"]}
        scored = (await service.http.post("/v1/completions", json=whole)).json()["choices"][0]
    assert scored["text"] == whole["prompt"]
    assert scored["logprobs"]["tokens"][-count:] == answered["logprobs"]["tokens"]
    expected = pytest.approx(answered["logprobs"]["token_logprobs"], abs=1e-4)
    assert scored["logprobs"]["token_logprobs"][-count:] == expected
    assert scored["logprobs"]["text_offset"][-1] < len(whole["prompt"])
    for name, top in zip(
        scored["logprobs"]["tokens"][1:], scored["logprobs"]["top_logprobs"][1:], strict=True
    ):
        assert name in top


# Prompts that are cut


@pytest.mark.parametrize(("newest", "left"), [(3, "789"), (9, "123456789"), (100, "123456789")])
async def test_truncated_prompt_keeps_its_newest_tokens(tokenizer, newest, left):
    target = ScriptedTarget(ANSWER)
    async with client_of(tokenizer, target) as client:
        ask = {**ASK, "prompt": "123456789", "truncate_prompt_tokens": newest, "echo": True}
        body = (await client.post("/v1/completions", json=ask)).json()
    assert bytes(target.requests[1].decode.turn.tokens) == left.encode()
    assert body["choices"][0]["text"] == left + TEXT
    assert body["usage"]["prompt_tokens"] == len(left)


async def test_prompt_truncated_to_the_context_leaves_room_for_the_answer(tokenizer):
    prompt = "x" * 2 * MAX_LENGTH
    async with client_of(tokenizer, ScriptedTarget(ANSWER)) as client:
        ask = {**ASK, "prompt": prompt, "truncate_prompt_tokens": -1}
        usage = (await client.post("/v1/completions", json=ask)).json()["usage"]
        assert usage["prompt_tokens"] == MAX_LENGTH - ASK["max_tokens"]
        refused = await client.post("/v1/completions", json={**ASK, "prompt": prompt})
    assert refused.status_code == 400


async def test_chat_truncated_keeps_the_newest_tokens_and_answers_in_the_room_left(tokenizer):
    target = ScriptedTarget(ANSWER)
    chat = {"messages": [{"role": "user", "content": "x" * 2 * MAX_LENGTH}]}
    async with client_of(tokenizer, target) as client:
        answer = await client.post("/v1/chat/completions", json={**chat, "truncate_prompt_tokens": 4})
    assert answer.status_code == 200, answer.text
    assert bytes(target.requests[1].decode.turn.tokens) == b"xxx;"
    assert target.requests[0].open.sampling.max_tokens == MAX_LENGTH - 4


@pytest.mark.parametrize("wrong", [-2, 0, 1.5, True])
async def test_truncation_to_no_number_of_tokens_is_refused(client, wrong):
    response = await client.post("/v1/completions", json={**ASK, "truncate_prompt_tokens": wrong})
    assert response.status_code == 400
