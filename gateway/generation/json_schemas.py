"""JSON schemas as callers send them, made fit for the compiler of grammars."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# One line, as json.dumps and chat templates write JSON: so names and punctuation are forced, and no model can
# go on with spaces for ever. Alternatives that overlap are read as anyOf.
AS_WRITTEN: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
# Formats that a text is held to; JSON Schema calls every format an annotation.
FORMATS = {
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
}  # fmt: skip
MAPS = {"properties", "patternProperties", "$defs", "definitions"}  # words whose values are schemas by name
LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
SINGLE = {"items", "additionalItems", "additionalProperties"}


def fitted(schema: Any) -> Any:
    """Returns the schema without words that ask for nothing.

    Raises:
        ValueError: drafts of JSON Schema disagree on what it means.
    """
    if not isinstance(schema, dict):
        return schema
    if "$id" in schema and "$ref" in schema:
        raise ValueError("$id beside $ref is not accepted: drafts of JSON Schema disagree on it")
    return {word: _part(word, value) for word, value in schema.items() if not _asks_nothing(word, value)}


def _part(word: str, value: Any) -> Any:
    if word in MAPS and isinstance(value, dict):
        return {name: fitted(part) for name, part in value.items()}
    if word in LISTS and isinstance(value, list):
        return [fitted(part) for part in value]
    return fitted(value) if word in SINGLE else value


def _asks_nothing(word: str, value: Any) -> bool:
    """Whether a word allows every value: names of properties are texts, and unknown formats annotations."""
    if word == "propertyNames":
        return value in (True, {}, {"type": "string"})
    return word == "format" and not (isinstance(value, str) and value in FORMATS)
