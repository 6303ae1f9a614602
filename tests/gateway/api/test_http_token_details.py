"""Details of single tokens over HTTP, with the demo pair: prompt log-probabilities, ids, why a text ended."""

import httpx
import pytest

from gateway.api import http_api
from gateway.api.openai.chat_template import ChatTemplate
from tests.support.http_calls import events_of
from tests.support.service import ANYBODY, service_of
from workshop.demo.chat import CHAT_TEMPLATE, RESPONSE_TEMPLATE

TEXT = {"prompt": "The capital of", "max_tokens": 3, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}


@pytest.fixture
async def client():
    template = ChatTemplate(CHAT_TEMPLATE, {}, response_template=RESPONSE_TEMPLATE)
    async with service_of() as service:
        app = http_api.build(service.generation, template, ANYBODY)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


async def of_text(client, **more):
    return (await client.post("/v1/completions", json={**TEXT, **more})).json()["choices"][0]


async def of_chat(client, **more):
    return (await client.post("/v1/chat/completions", json={**CHAT, **more})).json()


async def test_prompt_logprobs_are_those_of_an_echoed_prompt(client):
    echoed = await of_text(client, echo=True, logprobs=2, max_tokens=0)
    told = await of_text(client, prompt_logprobs=2, return_token_ids=True)
    places, ids = told["prompt_logprobs"], told["prompt_token_ids"]
    assert places[0] is None
    assert len(places) == len(ids)
    own = [place[str(token_id)] for place, token_id in zip(places[1:], ids[1:], strict=True)]
    assert [each["logprob"] for each in own] == pytest.approx(echoed["logprobs"]["token_logprobs"][1:])
    assert [each["decoded_token"] for each in own] == echoed["logprobs"]["tokens"][1:]
    for place in places[1:]:
        ranked = sorted((each for each in place.values() if each["rank"]), key=lambda each: each["rank"])
        assert [each["rank"] for each in ranked] == [1, 2]
        assert ranked[0]["logprob"] >= ranked[1]["logprob"]


async def test_prompt_logprobs_leave_the_answer_as_it_is(client):
    plain, told = await of_text(client, logprobs=1), await of_text(client, logprobs=1, prompt_logprobs=3)
    assert told["text"] == plain["text"]
    assert told["logprobs"] == plain["logprobs"]
    assert (await of_text(client, prompt_logprobs=3))["logprobs"] is None


async def test_prompt_logprobs_of_a_chat_stand_beside_its_choices(client):
    told = await of_chat(client, prompt_logprobs=0, return_token_ids=True)
    assert [len(place) for place in told["prompt_logprobs"][1:]] == [1] * (len(told["prompt_token_ids"]) - 1)
    assert told["choices"][0]["logprobs"] is None


async def test_prompt_logprobs_that_cannot_be_told_are_refused(client):
    for more in ({"stream": True}, {"logprobs_of": "processed"}):
        answer = await client.post("/v1/completions", json={**TEXT, "prompt_logprobs": 1, **more})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_token_ids_of_a_stream_are_those_of_the_whole_answer(client):
    whole = await of_chat(client, return_token_ids=True)
    ask = {**CHAT, "return_token_ids": True, "stream": True}
    *events, _ = events_of(await client.post("/v1/chat/completions", json=ask))
    parts = [httpx.Response(200, text=event).json() for event in events]
    ids = [token for part in parts for choice in part["choices"] for token in choice.get("token_ids", ())]
    assert ids == whole["choices"][0]["token_ids"]
    assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    text = await of_text(client, return_token_ids=True)
    ask = {**TEXT, "return_token_ids": True, "stream": True}
    *events, _ = events_of(await client.post("/v1/completions", json=ask))
    choices = [httpx.Response(200, text=event).json()["choices"][0] for event in events]
    assert [token for choice in choices for token in choice["token_ids"]] == text["token_ids"]
    assert choices[0]["prompt_token_ids"] == text["prompt_token_ids"]


async def test_stop_reason_is_the_string_or_the_token_that_ended_the_text(client):
    assert (await of_text(client))["stop_reason"] is None
    said = await of_text(client, return_token_ids=True)
    last = said["token_ids"][-1]
    assert (await of_text(client, stop=[said["text"][-3:]]))["stop_reason"] == said["text"][-3:]
    assert (await of_text(client, stop_token_ids=[last]))["stop_reason"] == last
    ids = (await of_chat(client, return_token_ids=True))["choices"][0]["token_ids"]
    chat = await of_chat(client, stop_token_ids=[ids[1]])
    assert chat["choices"][0]["stop_reason"] == ids[1]


async def test_tokens_of_a_text_are_named_by_their_ids_if_asked(client):
    said = await of_text(client, return_tokens_as_token_ids=True, return_token_ids=True, logprobs=2)
    names = [f"token_id:{token_id}" for token_id in said["token_ids"]]
    assert said["logprobs"]["tokens"] == names
    top = said["logprobs"]["top_logprobs"]
    assert all(name in place for name, place in zip(names, top, strict=True))
    assert all(other.startswith("token_id:") for place in top for other in place)


async def test_tokens_of_a_chat_are_named_by_their_ids_if_asked(client):
    asked = {
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "logprobs": True,
        "top_logprobs": 1,
    }
    (choice,) = (await of_chat(client, **asked))["choices"]
    places = choice["logprobs"]["content"]
    assert [place["token"] for place in places] == [f"token_id:{id_}" for id_ in choice["token_ids"]]
    assert [place["top_logprobs"][0]["token"] for place in places] == [place["token"] for place in places]
