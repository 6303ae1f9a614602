"""Arguments that a family writes without JSON: their types, their forms, and schemas of any kind."""

from contextlib import suppress

import pytest

from gateway.api.openai.answer_format import of_chat_template
from gateway.api.openai.calls.grammar import CallGrammar
from gateway.errors import InvalidRequestError
from outrider.decoding.grammar import GrammarError
from tests.support.calls import (
    FAMILIES,
    Tokens,
    calls_of,
    read,
)


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "allOf": []}}}, "allOf"),
        ({"type": "object", "patternProperties": {}}, "patternProperties"),
    ],
)
@pytest.mark.parametrize("name", ["qwen xml", "gemma 4"])
def test_schema_that_a_family_cannot_say_is_refused_by_name(name, schema, word):
    answers = of_chat_template(FAMILIES[name][0])
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(InvalidRequestError, match=f"'f' cannot be held to its schema's {word}") as refused:
        CallGrammar(answers.calls, {}, "tools").only_calls(tools, several=False)
    assert refused.value.field == "tools"


VALUES = {
    "text": ({"type": "string"}, "5", "5"),
    "number": ({"type": "integer"}, "5", 5),
    "any of": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
    "text of any of": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
    "python": ({"type": "boolean"}, "True", True),
    "reference": ({"$ref": "#/$defs/word"}, "5", "5"),
    "not JSON": ({"type": "integer"}, "five", "five"),
    "no number": ({"type": "number"}, "NaN", "NaN"),
    "undeclared": (None, "5", "5"),
    "object": ({"type": "object"}, '{"a":  [1]}', {"a": [1]}),
}


@pytest.mark.parametrize("name", VALUES)
def test_value_between_marks_is_of_the_type_that_the_schema_declares(name):
    schema, written, expected = VALUES[name]
    root = {"type": "object", "properties": {} if schema is None else {"x": schema}}
    root["$defs"] = {"word": {"type": "string"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": root}}]
    answers = of_chat_template(FAMILIES["qwen xml"][0])
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{written}\n</parameter>\n</function>\n</tool_call>"
    message, _ = read(answers, "", text, 1, tools)
    assert calls_of(message) == [("f", {"x": expected})]


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "maxLength": 3}, "abc", "abcd"),
        ({"type": "string", "pattern": "^[a-c]+/$"}, "ab/", "abd/"),
        ({"type": ["string", "null"], "enum": ["a", None]}, "a", "b"),
        ({"anyOf": [{"type": "integer"}, {"const": "all"}]}, "all", "some"),
        ({"$ref": "#/$defs/few"}, "2", "7"),
    ],
    ids=["length", "pattern", "values", "any of", "reference"],
)
def test_text_between_marks_is_held_to_its_schema(schema, right, wrong):
    root = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    root["$defs"] = {"few": {"type": "integer", "maximum": 3}}
    source, _, _, marks = FAMILIES["qwen xml"]
    tokens, answers = Tokens(marks), of_chat_template(source)
    tools = [{"type": "function", "function": {"name": "f", "parameters": root}}]
    form = CallGrammar(answers.calls, tokens.added, "tools").only_calls(tools, several=False)
    text = "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert tokens.follows(form, text.format(right)) == (True, True)
    assert tokens.follows(form, text.format(wrong))[0] is False


ODD = {
    "properties": {"type": "object", "properties": [1]},
    "types": {"type": "object", "properties": {"x": {"type": [{}]}}},
    "values": {"type": "object", "properties": {"x": {"enum": 7}}},
    "union": {"type": "object", "properties": {"x": {"anyOf": 7}}},
    "definitions": {"type": "object", "properties": {"x": {"$ref": "#/$defs/y"}}, "$defs": 7},
    "reference": {"type": "object", "properties": {"x": {"$id": "u:x", "$ref": "#/$defs/y"}}},
    "format": {"type": "object", "properties": {"x": {"type": "string", "format": []}}},
    "items": {"type": "object", "properties": {"x": {"type": "array", "items": [1]}}, "required": 7},
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("name", ["hermes", "qwen xml", "gemma 4", "olmo 3"])
def test_schema_of_any_kind_is_no_defect(name, case):
    source, prefix, text, marks = FAMILIES[name]
    answers, tokens = of_chat_template(source), Tokens(marks)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": ODD[case]}}]
    message, _ = read(answers, prefix, text, tools=tools)
    assert message["tool_calls"][0]["function"]["name"] == "weather"
    with suppress(InvalidRequestError, GrammarError):
        tokens.matcher(CallGrammar(answers.calls, tokens.added, "tools").only_calls(tools, several=False))
