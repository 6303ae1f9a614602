"""Generated documents: reproducible, well formed, and true."""

import json
import re
from random import Random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from workshop.demo.conversations import repetition_document
from workshop.demo.generated import GENERATORS


def texts(kind: str, count: int) -> list[str]:
    random = Random(3)
    return ["".join(GENERATORS[kind](random)) for _ in range(count)]


@pytest.mark.parametrize("kind", GENERATORS)
def test_generated_documents_repeat_with_the_seed(kind: str) -> None:
    assert texts(kind, 20) == texts(kind, 20)
    assert len(set(texts(kind, 20))) > 10


@pytest.mark.parametrize("kind", GENERATORS)
def test_prompt_does_not_end_in_a_space(kind: str) -> None:
    random = Random(3)
    for _ in range(200):
        document = GENERATORS[kind](random)
        assert document.prompt == document.prompt.rstrip()
        assert document.continuation


def test_json_documents_parse() -> None:
    types = {json.loads(text)["type"] for text in texts("json", 200)}
    assert types == {"person", "order", "measurement", "service"}


def test_chats_alternate_and_close_every_turn() -> None:
    turn = r"<\|user\|>[^<|]+<\|end\|><\|assistant\|>[^<|]+<\|end\|>"
    for text in texts("question_answer", 200):
        assert re.fullmatch(f"({turn}){{1,3}}", text), text


def test_equations_are_true() -> None:
    checked = 0
    for text in texts("arithmetic", 200):
        for left, operator, right, result in re.findall(r"(\d+) ([+x-]) (\d+) = (\d+)", text):
            signed = {"+": int(right), "-": -int(right)}
            expected = int(left) * int(right) if operator == "x" else int(left) + signed[operator]
            assert expected == int(result), text
            checked += 1
    assert checked > 500


def test_conversations_refer_to_what_was_said() -> None:
    """A name that was told is known, and a brief answer is one sentence."""
    known = brief = 0
    for text in texts("conversations", 300):
        if asked := re.search(r"Your name is (\w+)\.", text):
            assert f"Nice to meet you, {asked[1]}." in text
            known += 1
        if text.startswith("<|system|>Answer briefly."):
            questions = re.findall(
                r"<\|user\|>What is the opposite[^<]*<\|end\|><\|assistant\|>([^<]*)", text
            )
            assert all(answer.count(".") == 1 for answer in questions), text
            brief += len(questions)
    assert known > 50
    assert brief > 2


def test_repetition_is_what_was_said() -> None:
    random = Random(3)
    for _ in range(50):
        text = "".join(repetition_document(random))
        turns = re.findall(r"<\|user\|>\w+: ([^<]*)<\|end\|><\|assistant\|>([^<]*)<\|end\|>", text)
        assert len(turns) >= 2
        assert all(said == repeated for said, repeated in turns)


def offered(text: str) -> dict[str, Any]:
    """Parameters of the tools at hand, by name."""
    listed = re.match(r"<\|system\|>(?:[^<]*\n)?Tools:\n([^<]*)<\|end\|>", text)
    assert listed, text
    definitions = map(json.loads, listed[1].splitlines())
    return {definition["name"]: definition["parameters"] for definition in definitions}


def test_calls_are_of_tools_at_hand_and_suit_their_parameters() -> None:
    calls = []
    for text in texts("tool_calls", 300):
        tools = offered(text)
        for written in re.findall(r"<tool_call>(.*?)</tool_call>", text):
            call = json.loads(written)
            jsonschema.validate(call["arguments"], tools[call["name"]])
            calls.append(call["name"])
    assert len(calls) > 250
    assert len(set(calls)) > 12


def test_tool_call_arguments_occur_in_the_request() -> None:
    for text in texts("tool_calls", 100):
        for before, written in re.findall(
            r"<\|user\|>([^<]*)<\|end\|><\|assistant\|><tool_call>(.*?)</tool_call>", text
        ):
            values = json.loads(written)["arguments"].values()
            assert all(str(value) in before for value in values if not isinstance(value, bool)), text


def test_answers_suit_their_schema_and_say_what_the_text_says() -> None:
    with_schema = 0
    for text in texts("schema_answers", 300):
        prompt, found = text.rsplit("<|assistant|>", 1)
        value = json.loads(found.removesuffix("<|end|>"))
        for told in value.values():
            if isinstance(told, str):
                assert told in prompt
        if schema := re.search(r"of this schema: (\{.*?\})<\|end\|>", prompt):
            jsonschema.validate(value, json.loads(schema[1]))
            assert list(value) == list(json.loads(schema[1])["properties"])
            with_schema += 1
    assert with_schema > 200
