"""Predicted outputs: a prediction drafts the answer, and never changes it."""

import pytest

from gateway.errors import InvalidRequestError
from gateway.loop.factory import LoopFactory
from gateway.roster import BY_TASK
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence
from gateway.settings import GatewaySettings, Speculation
from outrider.decoding.settings import Sampling
from outrider.pace.settings import PaceSettings
from protos import generation_pb2
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget, fleet_of
from tests.support.grpc_calls import Context, servicer_of
from tests.support.http_calls import client_of

ANSWER = list(range(60, 100))
TEXT = bytes(ANSWER).decode()
CHAT = {
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": len(ANSWER),
    "speculation": {"mode": "fixed", "depth": 8, "report": True},
}


async def answered(client, content, **fields):
    """Returns the usage of a chat with a prediction, whose text must not depend on the prediction."""
    prediction = None if content is None else {"type": "content", "content": content}
    body = {**CHAT, "prediction": prediction, **fields}
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"]["content"] == TEXT
    return answer["usage"]


def counts(usage):
    details = usage["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


async def test_prediction_that_is_the_answer_drafts_all_of_it(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER)) as client:
        usage = await answered(client, TEXT)
    assert counts(usage) == (len(ANSWER), 0)
    assert usage["speculation"]["target_passes"] <= 6
    assert usage["speculation"]["drafted_by"].keys() == {"prediction"}


async def test_prediction_beside_a_drafter_of_the_target_is_united_with_it(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        settings = GatewaySettings(
            model="m", tokenizer="t", target_drafters=("eagle3",), drafts={}, drafters=("eagle3",)
        )
        factory = LoopFactory(fleet, Paces(PaceSettings()), settings)
        speculation = Speculation(drafter=BY_TASK).resolved(BY_TASK, PaceSettings())
        asked = [GatewaySequence((1, 2), Sampling(), 0, prediction=prediction) for prediction in ((), (3, 4))]
        names = [
            [each.name for each in factory.of(sequence, speculation, 0.0)._source._route._candidates]
            for sequence in asked
        ]
    assert names == [["eagle3"], ["prediction", "eagle3+prediction+suffix+ngram", "eagle3"]]


@pytest.mark.parametrize("content", ["", "what the model never says", "a" + TEXT[1:20]])
async def test_prediction_that_is_wrong_changes_no_text(tokenizer, content):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as client:
        accepted, rejected = counts(await answered(client, content))
    assert accepted + rejected == len(content)


async def test_prediction_in_parts_is_their_text(tokenizer):
    parts = [{"type": "text", "text": TEXT[:11]}, {"type": "text", "text": TEXT[11:]}]
    async with client_of(tokenizer, ScriptedTarget(ANSWER)) as client:
        assert counts(await answered(client, parts)) == (len(ANSWER), 0)


async def test_prediction_counts_do_not_depend_on_speculation(tokenizer):
    edited = TEXT[:9] + "##" + TEXT[12:]
    async with client_of(tokenizer, ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as client:
        with_drafts = await answered(client, edited)
        without = await answered(client, edited, speculation={"mode": "off"})
    assert counts(with_drafts) == counts(without)
    assert counts(without)[0] > len(ANSWER) * 3 // 4
    assert without["speculation"]["rounds"] == 0


async def test_usage_without_a_prediction_counts_no_predicted_token(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as client:
        usage = await answered(client, None)
    assert usage["speculation"]["accepted"] > 0
    assert counts(usage) == (0, 0)


async def test_prediction_for_several_answers_counts_in_each(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER)) as client:
        assert counts(await answered(client, TEXT, n=2)) == (2 * len(ANSWER), 0)


async def test_prediction_if_the_request_names_a_drafter_drafts_nothing(tokenizer):
    speculation = {**CHAT["speculation"], "drafter": "model"}
    async with client_of(tokenizer, ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as client:
        usage = await answered(client, TEXT, speculation=speculation)
    assert usage["speculation"]["drafted_by"].keys() == {"model"}


@pytest.mark.parametrize(
    "prediction",
    [
        "text",
        {"content": "x"},
        {"type": "tokens", "content": "x"},
        {"type": "content", "content": "x" * 10**5},
    ],
    ids=lambda value: str(value)[:40],
)
async def test_prediction_that_is_malformed_or_too_long_is_refused_by_name(tokenizer, prediction):
    async with client_of(tokenizer, ScriptedTarget(ANSWER)) as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, "prediction": prediction})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prediction")


@pytest.mark.parametrize(
    "predicted", [{"predicted_text": TEXT}, {"predicted_tokens": generation_pb2.TokenIds(ids=ANSWER)}]
)
async def test_prediction_over_grpc_is_text_or_tokens(tokenizer, predicted):
    message = generation_pb2.GenerateRequest(
        text="x",
        sampling=generation_pb2.Sampling(max_tokens=len(ANSWER)),
        speculation=generation_pb2.SpeculationSettings(mode="fixed", depth=8, report=True),
        **predicted,
    )
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        usage = (await servicer_of(fleet, tokenizer).Complete(message, Context())).usage
    assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (len(ANSWER), 0)
    assert usage.speculation.drafted_by["prediction"].accepted > len(ANSWER) * 3 // 4


async def test_predicted_token_that_is_unknown_is_refused_by_name(tokenizer):
    message = generation_pb2.GenerateRequest(text="x", predicted_tokens=generation_pb2.TokenIds(ids=[2**20]))
    context = Context()
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        with pytest.raises(InvalidRequestError, match="prediction: token id"):
            await servicer_of(fleet, tokenizer).Complete(message, context)
