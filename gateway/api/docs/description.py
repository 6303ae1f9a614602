"""OpenAPI document: the routes of the app with the schemas of their requests and responses."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from gateway.api.endpoints import ENDPOINTS, Endpoint
from gateway.api.openai.fields import IGNORED_HEADER, SEED_HEADER
from gateway.api.request_ids import HEADER

Schema = dict[str, Any]
Part = tuple[str, Literal["request", "answer", "events", "error"]]  # path, and part of its endpoint

REFUSALS: Final = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The settings keep every caller from it.",
    404: "The request names a model that is not served, or a response that is not kept.",
    408: "The body came too slowly.",
    413: "The body is too long.",
    429: "The queue is full, or a limit of the tenant is reached.",
    500: "No target can go on with the request.",
    503: "There is no worker, or its stream broke.",
    504: "The answer was not finished in time.",
}
JSON: Final = "application/json"
RETRIED = (429, 503)  # statuses with the header Retry-After
STREAMED = "With `stream`: the data of each event."
CLOSED = " The event after the last has `[DONE]` instead."
KEY = {"key": {"type": "http", "scheme": "bearer", "description": "needed if the service has API keys"}}
ID = {"schema": {"type": "string", "maxLength": 128}, "description": "the caller's own id, or a random id"}
SEED = {"schema": {"type": "string"}, "description": "seed with which the same request gives the same text"}
IGNORED = {"schema": {"type": "string"}, "description": "names of ignored fields"}
RETRY = {"schema": {"type": "integer"}, "description": "seconds to wait before the next attempt"}


def described(app: FastAPI) -> dict[str, Any]:
    """Returns the document with every path of ENDPOINTS and the schemas of all bodies."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas, components = _schemas()
    for name, endpoint in ENDPOINTS.items():
        method, _, path = name.rpartition(" ")
        operations = document["paths"][path]
        operations[method.lower() or _only(operations)] |= _operation(name, endpoint, schemas)
    document["components"] = {"schemas": components, "securitySchemes": KEY}
    return document


def _only(operations: Mapping[str, Any]) -> str:
    """Returns the method of a path that has one method, or one beside DELETE."""
    (method,) = operations.keys() - {"delete"}
    return method


@cache
def _schemas() -> tuple[Mapping[Part, Schema], Schema]:
    """Returns the schema of each part of an endpoint, and the components that the schemas refer to."""
    parts: dict[Part, tuple[Any, JsonSchemaMode]] = {}
    for path, endpoint in ENDPOINTS.items():
        parts[path, "request"] = endpoint.request, "validation"
        parts[path, "answer"] = endpoint.answer, "serialization"
        parts[path, "events"] = endpoint.events, "serialization"
        parts[path, "error"] = endpoint.error, "serialization"
    adapters = [(part, mode, TypeAdapter[Any](kind)) for part, (kind, mode) in parts.items() if kind]
    by_part, document = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")
    return {part: schema for (part, _), schema in by_part.items()}, document["$defs"]


def _operation(path: str, endpoint: Endpoint, schemas: Mapping[Part, Schema]) -> Schema:
    """Returns what the document adds to FastAPI's description of a path."""
    added: Schema = {"responses": _responses(path, endpoint, schemas)}
    if 401 in endpoint.refusals:
        added["security"] = [{"key": []}]
    if endpoint.request is not None:
        added["requestBody"] = {"required": True, "content": _json(schemas[path, "request"])}
        added["parameters"] = [{"name": HEADER, "in": "header", **ID}]
    return added


def _responses(path: str, endpoint: Endpoint, schemas: Mapping[Part, Schema]) -> Schema:
    headers = {HEADER: ID}
    given = headers | ({SEED_HEADER: SEED, IGNORED_HEADER: IGNORED} if endpoint.events else {})
    answer: Schema = {"headers": given}
    if endpoint.answer is not None:
        kind = "text/plain" if endpoint.answer is str else JSON
        answer["content"] = {kind: {"schema": schemas[path, "answer"]}}
    if endpoint.events is not None:
        events = schemas[path, "events"]
        description = STREAMED + ("" if "discriminator" in events else CLOSED)
        answer["content"]["text/event-stream"] = {"schema": {**events, "description": description}}
    responses = {"200": {"description": "The answer.", **answer}}
    if endpoint.unready:
        responses["503"] = {"description": "No target worker is ready.", **answer}
    for status in endpoint.refusals:
        responses[str(status)] = {
            "description": REFUSALS[status],
            "headers": headers | ({"Retry-After": RETRY} if status in RETRIED else {}),
            "content": _json(schemas[path, "error"]),
        }
    return responses


def _json(schema: Schema) -> Schema:
    return {JSON: {"schema": schema}}
