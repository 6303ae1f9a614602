"""Bodies of requests: from JSON to what an endpoint takes."""

import asyncio
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request as HttpRequest

from gateway.api.openai.fields import UnknownFields, ignored, served, without_unknown
from gateway.api.openai.schemas import GenerationRequest, invalid
from gateway.api.request_ids import HEADER
from gateway.errors import InvalidRequestError
from gateway.generation.request import Prepared

RequestT = TypeVar("RequestT", bound=BaseModel)

REFUSALS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "The request names a model that is not served.",
    413: "The body is too long.",
    429: "The queue is full; the header Retry-After says when to come again.",
    500: "No target can go on with the request.",
    503: "There is no worker, or its stream broke.",
    504: "The answer was not finished in time.",
}
LONG_BODY = 2**16  # bytes, about a millisecond's work: from here on a thread takes it


@dataclass(frozen=True)
class Parsed(Generic[RequestT]):
    body: RequestT
    ignored: list[str]  # names of fields that change nothing


async def parsed(kind: type[RequestT], request: HttpRequest, unknown: UnknownFields) -> Parsed[RequestT]:
    """
    Args:
        unknown: what becomes of fields that nobody knows.

    Raises:
        InvalidRequestError: naming the field, and "body" for what is no JSON at all.
    """
    text = await request.body()
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Any page in a browser may send another type to a service on its machine, JSON only with its consent.
    if content_type != "application/json":
        raise InvalidRequestError("body", "Content-Type: application/json is accepted")
    parse = partial(_parsed, kind, text, unknown)
    return await asyncio.to_thread(parse) if len(text) > LONG_BODY else parse()


def _parsed(kind: type[RequestT], text: bytes, unknown: UnknownFields) -> Parsed[RequestT]:
    try:
        fields = served(from_json(text))
    except ValueError as error:
        raise InvalidRequestError("body", f"is no JSON: {error}") from error
    try:
        body = kind.model_validate(fields)
        return Parsed(body, ignored(body))
    except ValidationError as error:
        left, names = without_unknown(fields, error) if unknown == "ignore" else (fields, [])
        if not names:
            raise invalid(error) from error
    try:
        body = kind.model_validate(left)
    except ValidationError as error:
        raise invalid(error) from error
    return Parsed(body, sorted({*ignored(body), *names}))


def told_seed(body: GenerationRequest, prepared: Prepared) -> int:
    """The caller's own where there is one: a negative one stands for another that is used in its place."""
    return prepared.seed if body.seed is None else body.seed


@cache
def described(kind: type[BaseModel], path: str) -> dict[str, Any]:
    """For that path of the OpenAPI document."""
    place = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema"
    schema = kind.model_json_schema(ref_template=f"{place}/$defs/{{model}}")
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "parameters": [{"name": HEADER, "in": "header", "schema": {"type": "string", "maxLength": 128}}],
        "security": [{"key": []}],
        "responses": {str(status): _refusal(meaning) for status, meaning in REFUSALS.items()},
    }


def _refusal(meaning: str) -> dict[str, Any]:
    fields = {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")}
    error = {"type": "object", "properties": {"error": {"type": "object", "properties": fields}}}
    return {"description": meaning, "content": {"application/json": {"schema": error}}}
