"""Bodies of requests: from JSON to what an endpoint takes."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from gateway.api.openai.fields import UnknownFields, ignored, served, without_unknown
from gateway.api.openai.schemas import GenerationRequest, invalid
from gateway.errors import InvalidRequestError
from gateway.generation.request import Prepared

RequestT = TypeVar("RequestT", bound=BaseModel)

LONG_BODY = 2**16  # bytes, about a millisecond's work: from here on a thread takes it


@dataclass(frozen=True)
class Parsed(Generic[RequestT]):
    body: RequestT
    ignored: list[str]  # names of fields that change nothing

    def also_ignoring(self, names: Iterable[str]) -> "Parsed[RequestT]":
        """Returns the same with more such names."""
        return replace(self, ignored=sorted({*self.ignored, *names}))


async def parsed(kind: type[RequestT], text: bytes, unknown: UnknownFields) -> Parsed[RequestT]:
    """
    Args:
        unknown: what becomes of fields that nobody knows.

    Raises:
        InvalidRequestError: naming the field, and "body" for what is no JSON at all.
    """
    parse = partial(_parsed, kind, text, unknown)
    return await asyncio.to_thread(parse) if len(text) > LONG_BODY else parse()


def _parsed(kind: type[RequestT], text: bytes, unknown: UnknownFields) -> Parsed[RequestT]:
    try:
        fields = served(from_json(text), kind.model_fields)
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
