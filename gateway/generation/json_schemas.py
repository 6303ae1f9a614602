"""Adapts callers' JSON schemas to the compiler of grammars."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# JSON is on one line, as json.dumps and chat templates write it. So names and punctuation are forced tokens,
# and a model cannot generate spaces for ever. Overlapping alternatives of oneOf are read as anyOf.
AS_WRITTEN: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
# Formats that are enforced; in JSON Schema every format is only an annotation.
FORMATS = {
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
}  # fmt: skip
MAPS = {"properties", "patternProperties", "$defs", "definitions"}  # keywords with schemas by name
LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
SINGLE = {"items", "additionalItems", "additionalProperties"}


def fitted(schema: Any) -> Any:
    """Returns the schema without keywords that constrain nothing.

    Raises:
        ValueError: versions of JSON Schema disagree on what the schema means.
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
    """Returns whether a keyword allows every value: an unknown format is only an annotation."""
    if word == "propertyNames":
        return value in (True, {}, {"type": "string"})
    return word == "format" and not (isinstance(value, str) and value in FORMATS)
