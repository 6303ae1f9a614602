"""Forms of answers over both APIs, as clients ask for them."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import grpc
import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel, Field

from protos import generation_pb2, generation_pb2_grpc
from tests.support.service import Service, service_of

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LARK = 'start: NAME " is " NAME\nNAME: /[a-z]{2,5}/'


def is_person(text: str) -> bool:
    found = json.loads(text)
    return (
        [*found] == ["name", "age", "tags"]
        and 0 <= found["age"] <= 150
        and {*found["tags"]} <= {"red", "green"}
    )


Check = Callable[[str], object]
FORMS: dict[str, tuple[dict[str, Any], Check]] = {
    "json_schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "p", "strict": True, "schema": PERSON},
            }
        },
        is_person,
    ),
    "json": ({"structured_outputs": {"json": PERSON}}, is_person),
    "regex": (
        {"structured_outputs": {"regex": r"(19|20)\d\d-[01]\d"}},
        re.compile(r"(19|20)\d\d-[01]\d").fullmatch,
    ),
    "choice": (
        {"structured_outputs": {"choice": ['a "quoted" one', "Ünïcödé 🏇", "two\nlines\\"]}},
        ['a "quoted" one', "Ünïcödé 🏇", "two\nlines\\"].__contains__,
    ),
    "grammar": ({"structured_outputs": {"grammar": LARK}}, re.compile("[a-z]{2,5} is [a-z]{2,5}").fullmatch),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[Service]:
    async with service_of() as service:
        yield service


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def complete(service: Service, **body: Any) -> dict[str, Any]:
    asked = {"prompt": "Name somebody: ", "max_tokens": 64, "seed": 3, "temperature": 0.8, **body}
    asked["speculation"] = {**body.get("speculation", {}), "report": True}
    answer = await service.http.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return {**body["choices"][0], "usage": body["usage"]["speculation"]}


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("form", FORMS)
async def test_answer_with_a_form_is_equal_under_every_drafter(service: Service, form: str) -> None:
    fields, is_right = FORMS[form]
    texts = []
    for speculation in (
        {"mode": "off"},
        {"mode": "fixed", "depth": 5},
        {"mode": "fixed", "depth": 3, "drafter": "ngram"},
    ):
        answer = await complete(service, **fields, speculation=speculation)
        assert answer["finish_reason"] == "stop"
        assert is_right(answer["text"]), answer["text"]
        texts.append(answer["text"])
    assert len({*texts}) == 1, texts


CHAIN = "\n".join(["start: r0", *(f"r{rule}: r{rule + 1}" for rule in range(7000)), 'r7000: "a"'])


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"grammar": CHAIN}, "refers to its own parts too deeply"),
        ({"json": {"type": "integer", "multipleOf": 99_999_989}}, "takes more than 2 s of processor time"),
    ],
    ids=["deep", "long"],
)
async def test_completions_grammar_takes_too_much_names_its_field_and_others_are_answered(
    service: Service, form: dict[str, Any], reason: str
) -> None:
    body = {"prompt": "x", "max_tokens": 8, "structured_outputs": form}
    refused = asyncio.create_task(service.http.post("/v1/completions", json=body))
    fields, is_right = FORMS["regex"]
    assert is_right((await complete(service, **fields))["text"])
    error = (await refused).json()["error"]
    (field,) = form
    assert (error["type"], error["param"]) == ("invalid_request_error", f"structured_outputs.{field}")
    assert reason in error["message"]
    assert is_right((await complete(service, **fields))["text"])


async def test_json_object_answer_is_json_as_far_as_it_got(service: Service) -> None:
    answer = await complete(service, response_format={"type": "json_object"}, max_tokens=12)
    assert answer["text"].startswith("{")
    if answer["finish_reason"] == "stop":
        json.loads(answer["text"])


async def test_chat_follows_its_schema_in_a_stream_too(service: Service) -> None:
    fields, _ = FORMS["json_schema"]
    asked = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 64, "seed": 5, **fields}
    whole = (await service.http.post("/v1/chat/completions", json=asked)).json()["choices"][0]
    assert whole["finish_reason"] == "stop"
    assert is_person(whole["message"]["content"])
    streamed = await service.http.post("/v1/chat/completions", json={**asked, "stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line.startswith("data: {")]
    said = [choice["delta"].get("content", "") for event in events for choice in event["choices"]]
    assert "".join(said) == whole["message"]["content"]


class Tag(BaseModel):
    name: Literal["red", "green"]
    weight: int = Field(ge=0, le=9)


class Person(BaseModel):
    """Model that the official client turns into a strict schema."""

    name: str = Field(pattern="^[A-Z][a-z]{1,8}$")
    age: int = Field(ge=0, le=150)
    tags: list[Tag] = Field(max_length=2)
    email: str | None = Field(max_length=12)


async def test_openai_client_parses_its_models(service: Service) -> None:
    http: Any = service.http  # httpx, under the types of a fork
    client = openai.AsyncOpenAI(base_url="http://service/v1", api_key="none", http_client=http)
    answer = await client.chat.completions.parse(
        model="m",
        messages=[{"role": "user", "content": "Who?"}],
        max_completion_tokens=120,
        seed=2,
        response_format=Person,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Person)


async def test_choices_of_one_request_differ_and_are_all_valid(service: Service) -> None:
    fields, _ = FORMS["json"]
    asked = {"prompt": "x", "max_tokens": 64, "n": 3, "seed": 1, **fields}
    choices = (await service.http.post("/v1/completions", json=asked)).json()["choices"]
    assert all(is_person(choice["text"]) for choice in choices)
    assert len({choice["text"] for choice in choices}) > 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a schema that nothing satisfies": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"allOf": [{"type": "string"}, {"type": "null"}]}},
            }
        },
        "response_format.json_schema.schema",
    ),
    "a keyword that is not served": (
        {"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}},
        "structured_outputs.json",
    ),
    "a schema elsewhere": (
        {"structured_outputs": {"json": {"$ref": "file:///etc/passwd"}}},
        "structured_outputs.json",
    ),
    "text that is no schema": ({"structured_outputs": {"json": "[1"}}, "structured_outputs.json"),
    "too many properties": (
        {
            "structured_outputs": {
                "json": {"type": "object", "properties": {f"p{n}": {} for n in range(2000)}}
            }
        },
        "structured_outputs.json",
    ),
    "more than is read": ({"structured_outputs": {"regex": "a" * 2**17}}, "structured_outputs.regex"),
    "look-ahead": ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
    "an unknown rule": ({"structured_outputs": {"grammar": "start: thing"}}, "structured_outputs.grammar"),
    "an empty choice": ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
    "two forms": ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    "none": ({"structured_outputs": {}}, "structured_outputs"),
    "both ways": (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
    ),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format"),
    "vLLM's that are not served": (
        {"structured_outputs": {"structural_tag": "x"}},
        "structured_outputs.structural_tag",
    ),
    "an end that is ignored": ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    "a stop string within it": ({"structured_outputs": {"json": {"const": {}}}, "stop": ["}"]}, "stop"),
    "a stop token within it": (
        {"structured_outputs": {"regex": "ab"}, "stop_token_ids": [7]},
        "stop_token_ids",
    ),
    "an end that comes too soon": ({"structured_outputs": {"regex": "a"}, "min_tokens": 5}, "min_tokens"),
    "tokens that it needs": (
        {"structured_outputs": {"regex": "a{3}"}, "allowed_token_ids": [300]},
        "structured_outputs",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_form_that_cannot_be_compiled_is_refused_before_work_begins(
    service: Service, case: str
) -> None:
    fields, param = REFUSED[case]
    answer = await service.http.post("/v1/completions", json={"prompt": "x", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert len(answer.json()["error"]["message"]) < 500


def grpc_request(speculation: dict[str, Any] | None = None, **form: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        text="Name somebody: ",
        sampling=generation_pb2.Sampling(max_tokens=64, seed=3, temperature=0.8),
        structured_outputs=generation_pb2.StructuredOutputs(**form),
        speculation=generation_pb2.SpeculationSettings(**{"report": True, **(speculation or {})}),
    )


GRPC_FORMS: dict[str, dict[str, Any]] = {
    "json": {"json": json.dumps(PERSON)},
    "regex": {"regex": r"(19|20)\d\d-[01]\d"},
    "choice": {"choice": generation_pb2.Texts(texts=FORMS["choice"][0]["structured_outputs"]["choice"])},
    "grammar": {"grammar": LARK},
}


@pytest.mark.parametrize("form", GRPC_FORMS)
async def test_grpc_gives_the_same_answer_as_http(service: Service, form: str) -> None:
    stub = generation_pb2_grpc.GenerationStub(service.channel)
    asked = grpc_request({"mode": "fixed", "depth": 4}, **GRPC_FORMS[form])
    completion = await stub.Complete(asked)
    chunks = [chunk async for chunk in stub.Generate(asked)]
    over_http = await complete(service, **FORMS[form][0])
    assert completion.choices[0].text == "".join(chunk.text for chunk in chunks) == over_http["text"]


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"json": '{"type": "nonsense"}'}, "structured_outputs.json"),
        ({"regex": "("}, "structured_outputs.regex"),
        ({"choice": generation_pb2.Texts()}, "structured_outputs.choice"),
        ({"grammar": "start: thing"}, "structured_outputs.grammar"),
        ({"json_object": False}, "structured_outputs"),
    ],
)
async def test_grpc_wrong_form_is_refused_with_the_name_of_its_field(
    service: Service, form: dict[str, Any], field: str
) -> None:
    stub = generation_pb2_grpc.GenerationStub(service.channel)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Complete(grpc_request(**form))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{field}: " in (refused.value.details() or "")


async def test_grammar_in_sampling_is_refused(service: Service) -> None:
    asked = generation_pb2.GenerateRequest(text="x", sampling=generation_pb2.Sampling(grammar="{}"))
    with pytest.raises(grpc.aio.AioRpcError, match=r"sampling\.grammar"):
        await generation_pb2_grpc.GenerationStub(service.channel).Complete(asked)


async def test_forced_tokens_are_counted_apart_from_drafted_ones(service: Service) -> None:
    fields, _ = FORMS["json"]
    plain = await complete(service, **fields, speculation={"mode": "off"})
    assert plain["usage"]["forced"] > 5
    assert plain["usage"]["drafted"] == plain["usage"]["accepted"] == 0
    drafted = await complete(service, **fields, speculation={"mode": "fixed", "depth": 4})
    for usage in (plain["usage"], drafted["usage"]):
        assert usage["accepted"] <= usage["reached"] <= usage["drafted"]
    stub = generation_pb2_grpc.GenerationStub(service.channel)
    said = (await stub.Complete(grpc_request({"mode": "off"}, **GRPC_FORMS["json"]))).choices[0]
    assert list(said.origins).count(generation_pb2.ORIGIN_FORCED) == plain["usage"]["forced"]
    assert len(said.token_ids) == plain["usage"]["forced"] + plain["usage"]["target_passes"]


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("speculation", [{"mode": "off"}, {"mode": "fixed", "depth": 3}])
async def test_answer_with_a_form_survives_the_loss_of_its_target(
    speculation: dict[str, Any],
) -> None:
    asked = grpc_request(speculation, **GRPC_FORMS["json"])
    async with service_of(targets=2) as service:
        stub = generation_pb2_grpc.GenerationStub(service.channel)
        expected = (await stub.Complete(asked)).choices[0].text
        chunks, text = stub.Generate(asked), ""
        async for chunk in chunks:
            text += chunk.text
            if len(text) > 12:
                for worker in service.of("target"):
                    if worker.client.open_sequences:
                        worker.client.leave()
                break
        async for chunk in chunks:
            text += chunk.text
    assert text == expected
    assert chunk.usage.speculation.lost_targets == 1
