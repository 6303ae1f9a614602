"""JSON of protobuf messages for HTTP responses, and its schema."""

from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

# 64-bit integers would be strings in JSON; no message here has such a field.
TYPES: Final = {
    FieldDescriptor.CPPTYPE_INT32: "integer",
    FieldDescriptor.CPPTYPE_UINT32: "integer",
    FieldDescriptor.CPPTYPE_DOUBLE: "number",
    FieldDescriptor.CPPTYPE_FLOAT: "number",
    FieldDescriptor.CPPTYPE_BOOL: "boolean",
    FieldDescriptor.CPPTYPE_STRING: "string",
}


def as_json(message: Message) -> dict[str, Any]:
    """Returns all fields of a message under their own names, without optional fields that are not set."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def json_schema_of(kind: Descriptor, **instead: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema of what ``as_json`` returns for a type of message.

    instead: schemas by field that replace the schema of its value, or of the items of a repeated field.
    """
    return {
        "title": kind.name,
        "type": "object",
        "properties": {
            field.name: _of_field(field, instead.get(field.name) or _of_value(field)) for field in kind.fields
        },
        "required": [field.name for field in kind.fields if not field.has_presence],
    }


def _of_field(field: FieldDescriptor, value: dict[str, Any]) -> dict[str, Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": value}
    return {"type": "array", "items": value} if field.is_repeated else value


def _of_value(field: FieldDescriptor) -> dict[str, Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return _of_value(field.message_type.fields_by_name["value"])
    if field.message_type is not None:
        return json_schema_of(field.message_type)
    return {"type": TYPES[field.cpp_type]}
