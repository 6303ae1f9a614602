"""JSON schemas of all kinds that clients send."""

from typing import Any

STRING = {"type": "string", "maxLength": 8}
WORD = {"type": "string", "pattern": "^[a-z]{2,6}$"}
INTEGER = {"type": "integer", "minimum": 0, "maximum": 999}


def object_of(required: Any = True, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties] if required else [],
        "additionalProperties": False,
    }


def array_of(items: Any, most: int = 4, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def recursive(node: dict[str, Any]) -> dict[str, Any]:
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


NODE = {"$ref": "#/$defs/node"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": object_of(name=STRING, age=INTEGER),
    "optional properties": object_of(False, name=STRING, age=INTEGER, active={"type": "boolean"}),
    "nested": object_of(a=object_of(b=object_of(c=object_of(d=INTEGER)))),
    "nested arrays": array_of(array_of(array_of({"type": "boolean"}, 2), 2), 3),
    "enum": {"enum": ["red", "green", "blue", "reddish", 7, None, True]},
    "enums in an object": object_of(state={"enum": ["open", "paid"]}, kind={"enum": ["a", "ab", "abc"]}),
    "const": {"const": {"value": [1, "two", None], "unit": "km"}},
    "a long const": {"const": " ".join(["all of this is forced"] * 4)},
    "escapes": {"enum": ['a "quote"', "back\\slash", "tab\there", "line\nend", "\u0001", "/", "\u2028"]},
    "escaped names": object_of(**{'na"me': INTEGER, "back\\slash": INTEGER, "line\n": INTEGER}),
    "unicode": {"enum": ["Ünïcödé", "日本語", "🏇🏽", "é", "e\u0301", "\u200b"]},
    "unicode names": object_of(größe=INTEGER, 名前=STRING),
    "unicode by pattern": {"type": "string", "pattern": "^[äöü🏇]{1,4}$"},
    "a pattern": object_of(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}(/[a-f]+)?$"}),
    "a date": object_of(day={"type": "string", "format": "date"}),
    "a time": object_of(at={"type": "string", "format": "date-time"}),
    "an address": object_of(ip={"type": "string", "format": "ipv4"}, id={"type": "string", "format": "uuid"}),
    "short strings": object_of(
        a={"type": "string", "minLength": 1, "maxLength": 3}, b={"type": "string", "maxLength": 0}
    ),
    "numbers": array_of({"type": "number", "minimum": -1.5, "maximum": 1e3}, 3),
    "bounds": array_of({"type": "integer", "exclusiveMinimum": -20, "exclusiveMaximum": 21}, 5, 1),
    "multiples": object_of(tens={"type": "integer", "multipleOf": 10, "minimum": 0, "maximum": 5000}),
    "a long array": array_of(INTEGER, 16, 12),
    "a long array of objects": array_of(object_of(x=INTEGER, y=INTEGER), 5, 4),
    "a tuple": {
        "type": "array",
        "prefixItems": [STRING, INTEGER, {"type": "boolean"}],
        "items": False,
        "minItems": 3,
    },
    "any of": {"anyOf": [object_of(a=INTEGER), array_of(WORD), {"type": "null"}]},
    "one of": {"oneOf": [object_of(kind={"const": "cat"}, lives=INTEGER), object_of(kind={"const": "dog"})]},
    "all of": {"allOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 5}]},
    "several types": object_of(value={"type": ["integer", "null", "boolean"]}),
    "a map": {"type": "object", "additionalProperties": INTEGER, "maxProperties": 3},
    "a map beside names": {
        "type": "object",
        "properties": {"id": INTEGER},
        "required": ["id"],
        "additionalProperties": {"enum": ["x", "y"]},
    },
    "references": {
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/place"}, "to": {"$ref": "#/$defs/place"}},
        "required": ["from", "to"],
        "additionalProperties": False,
        "$defs": {"place": object_of(city=WORD, floor=INTEGER)},
    },
    "a list that links to itself": recursive(
        object_of(value=INTEGER, next={"anyOf": [NODE, {"type": "null"}]})
    ),
    "a tree": recursive(object_of(name=WORD, children=array_of(NODE, 2))),
    "an expression": recursive(
        {"anyOf": [INTEGER, object_of(op={"enum": ["+", "*"]}, left=NODE, right=NODE)]}
    ),
    "a call": object_of(name={"const": "search"}, arguments=object_of(query=STRING, limit=INTEGER)),
}
