"""HTTP bodies, derived from the JSON schema of what an endpoint accepts: a new field is there at once."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from pydantic import BaseModel

from gateway.api.openai.fields import UNSERVED
from tests.fuzz import forms, values
from tests.fuzz.values import REAL, TEXTS, VOCAB_SIZE, WHOLE, Levels
from tests.support.service import MODEL


@dataclass(frozen=True)
class Literal:
    """JSON text: pieces, each with the number of its repetitions."""

    pieces: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return "".join(piece * times for piece, times in self.pieces)


LITERALS = st.sampled_from(
    [
        Literal((("NaN", 1),)),
        Literal((("Infinity", 1),)),
        Literal((("-Infinity", 1),)),
        Literal((("1e400", 1),)),
        Literal((("9" * 5, 1000),)),  # more digits than Python converts
        Literal((('"\\ud800"', 1),)),
        Literal((("[", 300), ("]", 300))),
        Literal((("[", 50_000), ("]", 50_000))),
        Literal((('{"a":', 50_000), ("1", 1), ("}", 50_000))),
        Literal((("[7", 1), (",7", 60_000), ("]", 1))),
        Literal((("", 1),)),
        Literal((('"', 1),)),
    ]
)
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(WHOLE),
    st.sampled_from(REAL),
    st.sampled_from(TEXTS),
    st.sampled_from([[], {}, [[]], {"": None}, [None], {"a": {"a": []}}, [-1], ["x"], "\ud800", ["\udfff"]]),
    LITERALS,
)

PROMPTS = ["def main(", "The cat", 'class History:\n    """', '{"name": "', "a b a b a b", "Ünïcödé 🏇"]
TOKEN_IDS = st.integers(0, VOCAB_SIZE - 1)
PROMPT = (
    st.sampled_from(PROMPTS) | st.text(min_size=1, max_size=20) | st.lists(TOKEN_IDS, min_size=1, max_size=20)
)
TOKEN_ID = Levels(TOKEN_IDS, st.sampled_from([0, 5, VOCAB_SIZE - 1]), ANYTHING)
IDS = values.several(TOKEN_ID, 0, math.inf, ANYTHING | st.just([VOCAB_SIZE]) | st.just([*range(VOCAB_SIZE)]))
EVERY_ID = st.just(Literal((("[7", 1), (",7", 60_000), ("]", 1)))) | st.just([*range(VOCAB_SIZE)])
BIASES = st.floats(-4.0, 4.0)

# Ordinary values of fields whose schema is wider than what clients send.
HINTS: dict[str, Levels] = {
    "prompt": Levels(
        PROMPT | st.lists(PROMPT, min_size=1, max_size=3),
        st.sampled_from(TEXTS) | IDS.extreme,
        ANYTHING | IDS.malformed | st.just(["x"] * 65),
    ),
    "model": Levels(st.just(MODEL), st.just(MODEL), ANYTHING),
    "tokens": IDS,
    "max_tokens": Levels(st.integers(1, 16), st.sampled_from([0, 1, 48, 49]), ANYTHING),
    "n": Levels(st.integers(1, 3), st.sampled_from([1, 16, 65]), ANYTHING),
    "logit_bias": Levels(
        st.dictionaries(TOKEN_IDS.map(str), BIASES, max_size=3),
        st.dictionaries(TOKEN_IDS.map(str), st.sampled_from(REAL), min_size=1, max_size=2)
        | st.sampled_from(REAL).map(lambda bias: dict.fromkeys(map(str, range(VOCAB_SIZE)), bias)),
        ANYTHING
        | st.dictionaries(
            st.sampled_from([*map(str, WHOLE), "", "a", "1.5"]), ANYTHING, min_size=1, max_size=2
        ),
    ),
    "allowed_token_ids": Levels(IDS.ordinary, IDS.extreme | EVERY_ID, IDS.malformed),
    "bad_token_ids": Levels(IDS.ordinary, IDS.extreme | EVERY_ID, IDS.malformed),
    "stop_token_ids": Levels(IDS.ordinary, IDS.extreme | EVERY_ID, IDS.malformed),
}
HINTS["max_output_tokens"] = HINTS["max_completion_tokens"] = HINTS["max_tokens"]
HINTS["response_format"] = forms.response_formats(ANYTHING)
HINTS["structured_outputs"] = forms.structured_outputs(ANYTHING)
SHORTHANDS = {"content": st.sampled_from(PROMPTS), "stop": st.text(min_size=1, max_size=3)}


def body_of(model: type[BaseModel]) -> Levels:
    """Bodies of requests that ``model`` accepts: plain values, and Literal if JSON text is odd."""
    schema = model.model_json_schema()
    return levels_of(schema, schema.get("$defs", {}))


def levels_of(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Levels:
    """Returns values of one part of a JSON schema. Raises NotImplementedError for unknown parts."""
    if "$ref" in schema:
        return levels_of(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        options = [levels_of(option, definitions) for option in schema["anyOf"]]
        kinds = ("ordinary", "extreme", "malformed")
        return Levels(*(st.one_of([option.of(kind) for option in options]) for kind in kinds))
    if "examples" in schema:
        return values.one_of(schema["examples"], ANYTHING)
    if "const" in schema or "enum" in schema:
        return values.one_of(schema.get("enum") or [schema["const"]], ANYTHING)
    low = schema.get("minimum", schema.get("exclusiveMinimum", -math.inf))
    high = schema.get("maximum", schema.get("exclusiveMaximum", math.inf))
    match schema.get("type"):
        case "integer":
            low += "exclusiveMinimum" in schema
            return values.whole(low, high - ("exclusiveMaximum" in schema), ANYTHING)
        case "number":
            low = math.nextafter(low, math.inf) if "exclusiveMinimum" in schema else low
            high = math.nextafter(high, -math.inf) if "exclusiveMaximum" in schema else high
            return values.real(low, high, ANYTHING)
        case "string":
            return values.text(schema.get("minLength", 0), schema.get("maxLength", math.inf), ANYTHING)
        case "boolean":
            return values.one_of([False, True], ANYTHING)
        case "null":
            return values.one_of([None], ANYTHING)
        case "array":
            item = levels_of(schema["items"], definitions)
            return values.several(item, schema.get("minItems", 0), schema.get("maxItems", math.inf), ANYTHING)
        case "object" if "properties" in schema:
            own = {name: _field(name, part, definitions) for name, part in schema["properties"].items()}
            unknown = st.dictionaries(
                st.sampled_from(["", "x", "n.", "\ud800", *UNSERVED]), ANYTHING, max_size=2
            )
            return values.fields(own, schema.get("required", []), unknown | ANYTHING)
        case "object":
            keys = st.text(max_size=3)
            return Levels(st.just({}), st.dictionaries(keys, ANYTHING, max_size=2), ANYTHING)
        case None:
            return Levels(ANYTHING, ANYTHING, ANYTHING)
    raise NotImplementedError(f"{schema} is not derived yet")


def _field(name: str, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Levels:
    levels = HINTS[name] if name in HINTS else levels_of(schema, definitions)
    if name not in SHORTHANDS:
        return levels
    return replace(levels, ordinary=SHORTHANDS[name] | levels.ordinary)


def encoded(value: Any) -> str:
    """JSON, with each Literal as it is written."""
    if isinstance(value, Literal):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(str(key))}:{encoded(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(encoded, value)) + "]"
    return json.dumps(value)
