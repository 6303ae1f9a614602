"""Forms of answers: ordinary forms, and forms that need much work."""

import json
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.values import TEXTS, Levels

SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 4}}, "required": ["name"]},
    {"type": "array", "items": {"enum": ["a", 1, None, "é🏇"]}, "maxItems": 3},
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}},
    {"const": {"value": 7, "unit": "km"}},
    {"type": "object", "x-guidance": {"whitespace_flexible": True}},
]
HOSTILE_SCHEMAS: list[Any] = [
    {},
    {"type": "nonsense"},
    {"$ref": "file:///etc/passwd"},
    {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}},
    {"type": "object", "properties": {f"p{number}": {} for number in range(600)}},
    {"type": "string", "minLength": 10**5, "maxLength": 10**9},
    {"type": "array", "minItems": 10**5},
    {"enum": [f"value {7919 * number}" for number in range(3000)]},
    {"pattern": "(((a{1,99}){1,99}){1,99})$", "type": "string"},
]
REGEXES = ["[0-9]{3}", "(yes|no)", ".*", "a+b*"]
HOSTILE_REGEXES = ["", "(", "(?=a)b", "((a{1,1000}){1,1000}){1,1000}", "(a|b)*a(a|b){30}", "\\p{L}{1,500}"]
LARKS = ['start: "yes" | "no"', "start: /[a-z]{1,9}/ "]
HOSTILE_LARKS = ["", "start: thing", "start: start", 'start: a\na: (a a)? b*\nb: "x"* "x"?', "start: <[5]>"]
CHOICES = [["yes", "no"], ['a "b"', "c\\\n"]]
HOSTILE_CHOICES: list[list[str]] = [[], [""], ["a", "a"], ["\x00"], [f"{number}" for number in range(5000)]]


def _json_schema(schema: Any) -> dict[str, Any]:
    named = {"name": "n", "description": "d", "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": named}


def _object_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_object", "schema": schema}


def _structured(schemas: list[Any], regexes: list[str], larks: list[str], choices: list[Any]) -> Any:
    """Draws each kind with equal probability, whatever its number of forms."""
    kinds = {
        "json": [*schemas, *map(json.dumps, schemas)],
        "json_object": [True],
        "regex": regexes,
        "grammar": larks,
        "choice": choices,
    }
    return st.one_of([st.sampled_from([{kind: form} for form in forms]) for kind, forms in kinds.items()])


def response_formats(anything: Any) -> Levels:
    plain = [{"type": "text"}, {"type": "json_object"}]
    return Levels(
        st.sampled_from([*plain, *map(_json_schema, SCHEMAS), *map(_object_of, SCHEMAS)]),
        st.sampled_from([*map(_json_schema, HOSTILE_SCHEMAS), *map(_object_of, HOSTILE_SCHEMAS)]),
        anything | anything.map(_json_schema) | anything.map(_object_of),
    )


def structured_outputs(anything: Any) -> Levels:
    return Levels(
        _structured(SCHEMAS, REGEXES, LARKS, CHOICES),
        _structured(HOSTILE_SCHEMAS, HOSTILE_REGEXES, HOSTILE_LARKS, HOSTILE_CHOICES),
        anything | st.just({"regex": "a", "choice": ["b"]}) | anything.map(lambda value: {"json": value}),
    )


def texts(ordinary: list[str], hostile: list[str]) -> Levels:
    """Returns values of a field of a message."""
    return Levels(st.sampled_from(ordinary), st.sampled_from(hostile), st.sampled_from(TEXTS))


OF_MESSAGES = {
    "outrider.v1.StructuredOutputs.json": texts(
        [*map(json.dumps, SCHEMAS)], [*map(json.dumps, HOSTILE_SCHEMAS)]
    ),
    "outrider.v1.StructuredOutputs.regex": texts(REGEXES, HOSTILE_REGEXES),
    "outrider.v1.StructuredOutputs.grammar": texts(LARKS, HOSTILE_LARKS),
}
