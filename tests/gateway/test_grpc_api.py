"""The Generation service over workers whose answer is written down beforehand."""

import grpc
import pytest

from gateway.errors import InvalidRequestError, WorkerLostError
from gateway.generation import Generation
from gateway.grpc_api import GenerationServicer
from gateway.settings import GatewaySettings
from protos import generation_pb2
from tests.fakes.scripted import MAX_LENGTH, ScriptedDraft, ScriptedTarget, fleet_of

TEXT = "The cat sät on the mat."
ANSWER = list(TEXT.encode())
SAMPLING = generation_pb2.Sampling(max_tokens=len(ANSWER), seed=4)


class Context:
    """What was told through it."""

    code = details = None

    def set_code(self, code):
        self.code = code

    def set_details(self, details):
        self.details = details


def servicer_of(fleet, tokenizer):
    servicer = GenerationServicer()
    servicer.generation = Generation(GatewaySettings(model="m", tokenizer="unused"), tokenizer, fleet)
    return servicer


@pytest.mark.parametrize(
    "prompt", [{"text": "x"}, {"tokens": generation_pb2.TokenIds(ids=[120])}], ids=["text", "token ids"]
)
async def test_an_answer_in_chunks(tokenizer, prompt):
    message = generation_pb2.GenerateRequest(sampling=SAMPLING, **prompt)
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        chunks = [chunk async for chunk in servicer_of(fleet, tokenizer).Generate(message, Context())]
    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == ANSWER
    last = chunks[-1]
    assert last.finish_reason == "length"
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (1, len(ANSWER))
    assert last.usage.speculation.seed == 4
    assert last.usage.speculation.target_passes + last.usage.speculation.accepted == len(ANSWER)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"sampling": generation_pb2.Sampling(temperature=-1)}, "temperature"),
        ({"speculation": generation_pb2.SpeculationSettings(mode="sometimes")}, "mode"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"text": ""}, "prompt"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_named(tokenizer, wrong, field):
    context = Context()
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        message = generation_pb2.GenerateRequest(**{"text": "x", **wrong})
        with pytest.raises(InvalidRequestError):
            await anext(servicer_of(fleet, tokenizer).Generate(message, context))
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert context.details.startswith(field)


async def test_without_a_target_the_service_is_unavailable(tokenizer):
    context = Context()
    async with fleet_of(None) as fleet:
        with pytest.raises(WorkerLostError):
            await servicer_of(fleet, tokenizer).GetModel(generation_pb2.GetModelRequest(), context)
    assert context.code is grpc.StatusCode.UNAVAILABLE


async def test_the_model_says_what_serves_it(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        model = await servicer_of(fleet, tokenizer).GetModel(generation_pb2.GetModelRequest(), Context())
    assert (model.id, model.max_length) == ("m", MAX_LENGTH)
    assert [worker.role for worker in model.workers] == ["target", "draft"]
