"""Protobuf messages as dictionaries, derived from their descriptors: a new field is there at once."""

import math
from collections.abc import Collection, Mapping
from typing import Any, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from gateway.api.openai.completions import CompletionRequest
from gateway.generation.form import Form
from gateway.settings import Speculation
from tests.fuzz import bodies, forms, values
from tests.fuzz.bodies import BIASES, PROMPTS, TOKEN_IDS
from tests.fuzz.values import REAL, TEXTS, VOCAB_SIZE, WHOLE, Levels
from tests.support.service import MODEL

Hints = Mapping[str, Levels]  # key: full or own name of a field

RANGES = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_SINT32: (-(2**31), 2**31 - 1),
}
NUMBERS = st.sampled_from([*REAL, math.nan, math.inf, -math.inf])
STRINGS = st.sampled_from(TEXTS) | st.text(max_size=4)


def _told_by_http() -> dict[str, Levels]:
    """Fields that the HTTP API has by the same name: their schema says what is ordinary there."""
    told: dict[str, Levels] = {}
    for model in (CompletionRequest, Speculation):
        schema = model.model_json_schema()
        for name, part in schema["properties"].items():
            if "$ref" not in part and name not in bodies.HINTS:
                told[name] = bodies.levels_of(part, schema.get("$defs", {}))
    return told


def _ids() -> Levels:
    extreme = st.sampled_from([[0], [5], [VOCAB_SIZE - 1], [7] * 3000, [*range(VOCAB_SIZE)]])
    return Levels(st.lists(TOKEN_IDS, max_size=3), extreme, st.sampled_from([[VOCAB_SIZE], [2**32 - 1] * 2]))


# Ordinary values of fields whose type is wider than what senders use; None leaves a field out.
HINTS: dict[str, Levels] = {
    **_told_by_http(),
    "text": Levels(st.sampled_from(PROMPTS) | st.text(min_size=1, max_size=20), STRINGS, STRINGS),
    "model": Levels(st.just(MODEL), st.just(MODEL), STRINGS),
    "max_tokens": Levels(st.integers(1, 16), st.sampled_from([1, 48, 49]), st.nothing()),
    "n": Levels(st.integers(1, 3), st.sampled_from([1, 16, 17]), st.nothing()),
    "outrider.v1.TokenIds.ids": Levels(
        st.lists(TOKEN_IDS, min_size=1, max_size=20), _ids().extreme, st.nothing()
    ),
    # The HTTP API has numbers where this field has them as text.
    "outrider.v1.GenerateRequest.priority": Levels(
        st.sampled_from(["interactive", "batch", "0", "-3"]),
        st.sampled_from(["9" * 18, "-" + "9" * 18]),
        STRINGS,
    ),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids", "bad_token_ids"), _ids()),
    **forms.OF_MESSAGES,
    "outrider.v1.Sampling.grammar": forms.texts(
        [Form("regex", regex, "").grammar() for regex in forms.REGEXES],
        [Form("regex", regex, "").grammar() for regex in forms.HOSTILE_REGEXES],
    ),
}
UNSAID = Levels(st.none(), st.none(), st.none())
PUBLIC_HINTS = HINTS | {
    "outrider.v1.Sampling.verification": UNSAID,  # not a caller's
    "outrider.v1.Sampling.grammar": UNSAID,
}


def descriptor_of(message: type[Message]) -> Descriptor:
    """Returns the descriptor of a message class, for which protobuf has two unrelated types."""
    return cast(Descriptor, message.DESCRIPTOR)


def message_of(descriptor: Descriptor, hints: Hints = HINTS, required: Collection[str] = ()) -> Levels:
    """Messages of that type, as dictionaries that its constructor takes."""
    own = {field.name: field_of(field, hints) for field in descriptor.fields}
    return values.fields(own, required, st.just({}))


def field_of(field: FieldDescriptor, hints: Hints = HINTS) -> Levels:
    """Values of the field; malformed values are all that its type can hold."""
    hint = hints.get(field.full_name) or hints.get(field.name)
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        return _map()
    levels = _value(field, hints)
    if field.is_repeated:
        levels = values.several(levels, 0, math.inf, levels.extreme.map(lambda value: [value]))
    if hint is None or message is not None:
        return levels
    low, high = RANGES.get(field.type, (-math.inf, math.inf))
    extreme = hint.extreme.filter(lambda value: not isinstance(value, int) or low <= value <= high)
    return Levels(hint.ordinary, extreme, levels.extreme | levels.malformed)


def leaves(descriptor: Descriptor) -> list[tuple[str, ...]]:
    """Paths of all fields that are no messages, through fields that are messages."""
    paths: list[tuple[str, ...]] = []
    for field in descriptor.fields:
        message = field.message_type
        if message is None or message.GetOptions().map_entry:
            paths.append((field.name,))
        else:
            paths += [(field.name, *path) for path in leaves(message) or [()]]
    return paths


def paths_in(message: Mapping[str, Any]) -> set[tuple[str, ...]]:
    """Returns the ``leaves`` that a dictionary sets."""
    found: set[tuple[str, ...]] = set()
    for name, value in message.items():
        for item in value if isinstance(value, list) and value else [value]:
            if isinstance(item, dict) and all(isinstance(key, str) for key in item):
                found |= {(name, *path) for path in paths_in(item) or [()]}
            if not isinstance(item, dict) or not item or not isinstance(next(iter(item)), str):
                found.add((name,))
    return found


def _map() -> Levels:
    """Returns maps of token ids to numbers, the only kind of map there is."""
    few = st.dictionaries(TOKEN_IDS, NUMBERS, min_size=1, max_size=2)
    every = NUMBERS.map(lambda number: dict.fromkeys(range(VOCAB_SIZE), number))
    beyond = st.dictionaries(_within(0, 2**32 - 1), NUMBERS, min_size=1, max_size=2)
    return Levels(st.dictionaries(TOKEN_IDS, BIASES, max_size=3), few | every, few | beyond)


def _value(field: FieldDescriptor, hints: Hints) -> Levels:
    """Strategy of single values of the field."""
    if field.message_type is not None:
        return message_of(field.message_type, hints)
    if field.enum_type is not None:
        known = [value.number for value in field.enum_type.values]
        return values.one_of(known, st.sampled_from([*known, -1, 2**31 - 1]))
    if field.type in RANGES:
        edges = _within(*RANGES[field.type])
        return Levels(st.integers(0, 3), edges, edges)
    match field.type:
        case FieldDescriptor.TYPE_DOUBLE:
            return Levels(st.floats(0.0, 1.0), NUMBERS, NUMBERS)
        case FieldDescriptor.TYPE_STRING:
            return Levels(st.text(max_size=4), STRINGS, STRINGS)
        case FieldDescriptor.TYPE_BYTES:
            return Levels(st.just(b""), st.binary(max_size=32), st.binary(max_size=4096))
        case FieldDescriptor.TYPE_BOOL:
            return values.one_of([False, True], st.booleans())
    raise NotImplementedError(f"{field.full_name} is of a type that is not derived yet")


def _within(low: int, high: int) -> SearchStrategy[int]:
    return st.sampled_from([number for number in WHOLE if low <= number <= high])
