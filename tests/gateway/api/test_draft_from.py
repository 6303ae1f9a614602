"""Past answers that draft: a stored answer is found by its id, by its own caller, and changes no text."""

import json

import pytest

from gateway.api.openai.chat_template import ChatTemplate
from protos import generation_pb2
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget, fleet_of
from tests.support.grpc_calls import Context, servicer_of
from tests.support.http_calls import bearer, client_of, events_of
from workshop.demo.chat import CHAT_TEMPLATE, RESPONSE_TEMPLATE

TEMPLATE = ChatTemplate(CHAT_TEMPLATE, {}, response_template=RESPONSE_TEMPLATE)
ANSWER = [*range(60, 100)]
FIXED = {"speculation": {"mode": "fixed", "depth": 8, "report": True}}
ASKS = {
    "/v1/completions": {"prompt": "x", "max_tokens": len(ANSWER), **FIXED},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": len(ANSWER),
        **FIXED,
    },
    "/v1/responses": {"input": "x", "max_output_tokens": len(ANSWER), **FIXED},
}
COMPLETIONS = "/v1/completions"
KEYS = ("one", "other")


@pytest.fixture
async def client(tokenizer):
    workers = ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)
    async with client_of(tokenizer, *workers, template=TEMPLATE, keys=KEYS) as client:
        client.headers.update(bearer("one"))
        yield client


async def asked(client, path=COMPLETIONS, headers=None, **more):
    answer = await client.post(path, json={**ASKS[path], **more}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def counts(answer):
    """Returns the predicted tokens that the answers have, and those that they do not have."""
    usage = answer["usage"]
    details = usage.get("completion_tokens_details") or usage["output_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


@pytest.mark.parametrize("first", ASKS)
@pytest.mark.parametrize("second", [COMPLETIONS, "/v1/chat/completions"])
async def test_stored_answer_drafts_the_answer_of_any_endpoint(client, first, second):
    stored = await asked(client, first, store=True)
    again = await asked(client, second, draft_from=stored["id"])
    assert counts(again) == (len(ANSWER), 0)
    assert again["usage"]["speculation"]["drafted_by"].keys() == {"prediction"}


async def test_stored_answer_drafts_a_response(client):
    stored = await asked(client, store=True)
    again = await asked(client, "/v1/responses", draft_from=stored["id"])
    assert again["usage"]["speculation"]["drafted_by"].keys() == {"prediction"}


async def test_streamed_answer_is_stored_before_its_last_event(client):
    body = {**ASKS[COMPLETIONS], "stream": True, "store": True}
    events = events_of(await client.post(COMPLETIONS, json=body))
    again = await asked(client, draft_from=json.loads(events[0])["id"])
    assert counts(again) == (len(ANSWER), 0)


async def test_answers_of_several_choices_draft_each_its_own(client):
    stored = await asked(client, store=True, n=2)
    three = await asked(client, draft_from=stored["id"], n=3)
    one = await asked(client, draft_from=stored["id"])
    assert counts(three) == (2 * len(ANSWER), 0)
    assert counts(one) == (len(ANSWER), 0)


@pytest.mark.parametrize("store", [False, None])
async def test_answer_that_was_not_to_be_stored_drafts_nothing(client, store):
    answer = await asked(client, store=store)
    again = await asked(client, draft_from=answer["id"])
    assert counts(again) == (0, 0)
    assert again["choices"] == answer["choices"]


async def test_stored_answer_is_found_by_its_own_caller_alone(client):
    stored = await asked(client, store=True)
    assert counts(await asked(client, draft_from=stored["id"], headers=bearer("other"))) == (0, 0)


async def test_stored_answer_is_no_response_and_can_be_deleted(client):
    path = f"/v1/responses/{(await asked(client, store=True))['id']}"
    assert (await client.get(path)).status_code == 404
    assert (await client.delete(path)).json()["deleted"] is True
    assert (await client.delete(path)).status_code == 404


async def test_draft_from_beside_a_prediction_is_refused_by_name(client):
    prediction = {"type": "content", "content": "x"}
    body = {**ASKS[COMPLETIONS], "draft_from": "cmpl-1", "prediction": prediction}
    refused = await client.post(COMPLETIONS, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "draft_from")


async def test_prediction_drafts_a_completion(client):
    text = bytes(ANSWER).decode()
    answer = await asked(client, prediction={"type": "content", "content": text})
    assert counts(answer) == (len(ANSWER), 0)


async def test_draft_from_over_grpc_finds_what_http_has_stored(tokenizer):
    def message(**more):
        sampling = generation_pb2.Sampling(max_tokens=len(ANSWER))
        return generation_pb2.GenerateRequest(text="x", sampling=sampling, **more)

    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        servicer = servicer_of(fleet, tokenizer)
        prepared = await servicer._prepared(message(), Context())
        async for _ in servicer.generation.chunks(prepared, "cmpl-1"):
            pass
        found = (await servicer.Complete(message(draft_from="cmpl-1"), Context())).usage
        missing = (await servicer.Complete(message(draft_from="cmpl-2"), Context())).usage
    assert found.accepted_prediction_tokens == len(ANSWER)
    assert missing.accepted_prediction_tokens == missing.rejected_prediction_tokens == 0
