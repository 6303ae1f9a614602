"""Parses request bodies from JSON to the model of an endpoint."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from gateway.api.openai.fields import (
    IGNORED_HEADER,
    SEED_HEADER,
    UnknownFields,
    ignored,
    served,
    without_unknown,
)
from gateway.api.openai.schemas import GenerationRequest, invalid
from gateway.errors import InvalidRequestError
from gateway.generation.request import Prepared

RequestT = TypeVar("RequestT", bound=BaseModel)

LONGEST_HEADER = 2048  # characters
LONG_BODY = 2**16  # bytes, parsed in about a millisecond; a thread parses longer bodies


@dataclass(frozen=True)
class Parsed(Generic[RequestT]):
    body: RequestT
    ignored: list[str]  # names of fields that changed nothing

    def also_ignoring(self, names: Iterable[str]) -> "Parsed[RequestT]":
        """Returns the body with more names of ignored fields."""
        return replace(self, ignored=sorted({*self.ignored, *names}))


async def parsed(kind: type[RequestT], text: bytes, unknown: UnknownFields) -> Parsed[RequestT]:
    """Returns the parsed body of a request.

    Args:
        unknown: whether unknown fields are refused or ignored.

    Raises:
        InvalidRequestError: a field is invalid, or the text is not JSON. The error names the field, or
            "body".
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


def reported_seed(body: GenerationRequest, prepared: Prepared) -> int:
    """Returns the seed as the caller sent it, which may be negative, or else the random seed."""
    return prepared.seed if body.seed is None else body.seed


def headers_of(asked: Parsed[Any], seed: int) -> dict[str, str]:
    """Returns the headers with the seed and with the names of ignored fields."""
    headers = {SEED_HEADER: str(seed)}
    if asked.ignored:
        # Callers choose the names of unknown fields, and a header may not hold every character.
        names = [name.encode("unicode_escape").decode() for name in asked.ignored]
        headers[IGNORED_HEADER] = ", ".join(names)[:LONGEST_HEADER]
    return headers
