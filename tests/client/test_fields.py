"""Arguments of requests: which there are, and what becomes of them."""

from typing import get_type_hints

import pytest

from outrider.client.errors import BadRequestError
from outrider.client.fields import (
    FormFields,
    SamplingFields,
    SpeculationFields,
    chat_request,
    prompt_request,
)
from protos import generation_pb2

OF_THE_GATEWAY = {"verification", "grammar"}  # fields of Sampling that no caller sets


@pytest.mark.parametrize(
    ("fields", "message", "others"),
    [
        (SamplingFields, generation_pb2.Sampling, OF_THE_GATEWAY),
        (SpeculationFields, generation_pb2.SpeculationSettings, set()),
        (FormFields, generation_pb2.StructuredOutputs, set()),
    ],
)
def test_fields_are_those_of_the_message(fields, message, others):
    assert get_type_hints(fields).keys() == {*message.DESCRIPTOR.fields_by_name} - others


def test_request_holds_every_kind_of_argument():
    request = prompt_request(
        [5, 6],
        {
            "temperature": 0.0,
            "logit_bias": {7: -1.0},
            "stop": "END",
            "speculation": {"mode": "off"},
            "structured_outputs": {"choice": ["a", "b"]},
            "prediction": "y",
            "model": "legal",
        },
    )
    assert request.tokens.ids == [5, 6]
    assert request.sampling.HasField("temperature")
    assert dict(request.sampling.logit_bias) == {7: -1.0}
    assert request.stop == ["END"]
    assert (request.speculation.mode, request.speculation.report) == ("off", True)
    assert request.structured_outputs.choice.texts == ["a", "b"]
    assert (request.predicted_text, request.model) == ("y", "legal")
    assert not request.HasField("task")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temprature": 1.0}, "temprature"),
        ({"temperature": "hot"}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"speculation": {"deep": 3}}, "speculation.deep"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
        ({"stop": [3]}, "stop"),
    ],
    ids=str,
)
def test_request_with_a_wrong_argument_names_it(fields, named):
    with pytest.raises(BadRequestError, match=f"^{named}: ") as raised:
        prompt_request("x", fields)
    assert raised.value.field == named


def test_chat_request_with_a_wrong_message_names_it():
    with pytest.raises(BadRequestError, match=r"^messages\.1\.content: "):
        chat_request([{"role": "user", "content": "x"}, {"role": "user", "content": 3}], {})
