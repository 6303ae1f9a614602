"""Drafts from past answers, which callers share only within an API key and a task."""

import pytest

from protos import generation_pb2
from tests.fakes.scripted import ScriptedTarget, fleet_of
from tests.support.grpc_calls import Context, servicer_of
from tests.support.http_calls import client_of

ANSWER = list(range(60, 100))
SPECULATION = {"mode": "fixed", "depth": 8, "drafter": "suffix", "report": True}
ASK = {"prompt": "x", "max_tokens": len(ANSWER), "speculation": SPECULATION}
CHAT = {
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": len(ANSWER),
    "speculation": SPECULATION,
}
KEYS = ["mine", "theirs"]


async def drafted(client, key, path="completions", **fields):
    """Returns the drafted tokens of a request, whose text must not depend on past answers."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {**(ASK if path == "completions" else CHAT), **fields}
    answer = (await client.post(f"/v1/{path}", json=body, headers=headers)).json()
    choice = answer["choices"][0]
    text = choice["text"] if path == "completions" else choice["message"]["content"]
    assert text == bytes(ANSWER).decode()
    return answer["usage"]["speculation"]["drafted"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_past_answers_over_http_are_kept_by_key_and_task(tokenizer, path):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), keys=KEYS) as client:
        assert await drafted(client, "mine", path) == 0
        assert await drafted(client, "theirs", path) == 0
        assert await drafted(client, "mine", path) > len(ANSWER) // 2
        assert await drafted(client, "mine", path, task="another") == 0


async def test_past_answers_are_shared_by_both_apis(tokenizer):
    message = generation_pb2.GenerateRequest(
        text="x",
        sampling=generation_pb2.Sampling(max_tokens=len(ANSWER)),
        speculation=generation_pb2.SpeculationSettings(**SPECULATION),
    )
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        servicer = servicer_of(fleet, tokenizer, keys=KEYS)

        async def complete(key):
            answer = await servicer.Complete(message, Context(authorization=f"Bearer {key}"))
            return answer.usage.speculation.drafted

        async def generate(key):
            context = Context(authorization=f"Bearer {key}")
            return [chunk async for chunk in servicer.Generate(message, context)][-1].usage.speculation

        assert [await complete(key) for key in KEYS] == [0, 0]
        assert await complete("mine") > len(ANSWER) // 2
        usage = await generate("theirs")
    assert usage.drafted > len(ANSWER) // 2
    of_suffix = usage.drafted_by["suffix"]
    assert (of_suffix.rounds, of_suffix.drafted) == (usage.rounds, usage.drafted)
    assert (of_suffix.reached, of_suffix.accepted) == (usage.reached, usage.accepted)


async def test_past_answers_of_local_callers_without_a_key_are_shared(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER)) as client:
        assert [await drafted(client, None) > 0 for _ in range(2)] == [False, True]


async def test_past_answers_are_off_by_one_setting(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), keys=KEYS, past_answer_tokens=0) as client:
        assert [await drafted(client, "mine") for _ in range(2)] == [0, 0]


async def test_past_answers_of_another_drafter_are_not_kept(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), keys=KEYS) as client:
        ngram = {**SPECULATION, "drafter": "ngram"}
        assert await drafted(client, "mine", speculation=ngram) == 0
        assert await drafted(client, "mine") == 0
