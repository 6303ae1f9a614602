"""HTTP responses to failed requests: a status, and a body in OpenAI's format."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from gateway.api.openai.answer_types import Error, ErrorCode, ErrorType
from gateway.api.openai.schemas import invalid
from gateway.api.request_ids import KEY
from gateway.errors import (
    DEFECT,
    GatewayError,
    InvalidRequestError,
    OverloadedError,
    TooLongError,
    UnknownResponseError,
    WorkerLostError,
)

RETRY_LOST_S = 1  # seconds after which a worker may have been replaced

TYPES: dict[int, ErrorType] = {401: "authentication_error", 429: "rate_limit_error"}
CODES: dict[int, ErrorCode] = {401: "invalid_api_key", 404: "model_not_found"}


def error_body(
    message: str, *, type_: ErrorType, param: str | None = None, code: ErrorCode | None = None
) -> Error:
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def error_answer(error: GatewayError) -> Error:
    """Returns the body of the response to a failed request."""
    status = error.http_status
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    field = error.field if isinstance(error, InvalidRequestError) else None
    code = CODES.get(status) if not isinstance(error, UnknownResponseError) else None
    if isinstance(error, TooLongError):
        code = "context_length_exceeded"
    return error_body(str(error), type_=kind, param=field, code=code)


@dataclass(frozen=True)
class Shape:
    """Format of errors in another API."""

    body: Callable[[int, str], Any]  # makes the body from the status and the message
    id_header: str  # header with the request's id


def answer_errors(app: FastAPI, shapes: Mapping[str, Shape]) -> None:
    """Turns every exception of an endpoint into a response.

    shapes: other formats of errors; key: prefix of the paths that use them.
    """

    def answered(
        request: HttpRequest, body: Error, status: int, headers: Mapping[str, str] | None = None
    ) -> JSONResponse:
        for beginning, shape in shapes.items():
            if request.url.path.startswith(beginning):
                told = {**(headers or {}), shape.id_header: request.scope[KEY]}
                return JSONResponse(shape.body(status, body["error"]["message"]), status, told)
        return JSONResponse(body, status, headers)

    @app.exception_handler(GatewayError)
    async def refused(request: HttpRequest, error: Exception) -> JSONResponse:
        assert isinstance(error, GatewayError)
        headers = {}
        if isinstance(error, OverloadedError):
            headers["Retry-After"] = str(math.ceil(error.retry_after_s))
        elif isinstance(error, WorkerLostError):
            headers["Retry-After"] = str(RETRY_LOST_S)
        return answered(request, error_answer(error), error.http_status, headers)

    @app.exception_handler(Exception)
    async def defect(request: HttpRequest, error: Exception) -> JSONResponse:
        """Answers 500; the server logs the exception."""
        return answered(request, error_body(DEFECT, type_="server_error"), 500)

    @app.exception_handler(ValidationError)
    async def contradictory(request: HttpRequest, error: Exception) -> JSONResponse:
        assert isinstance(error, ValidationError)
        return await refused(request, invalid(error))

    @app.exception_handler(HTTPException)
    async def no_such_thing(request: HttpRequest, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        body = error_body(str(error.detail), type_="invalid_request_error")
        return answered(request, body, error.status_code, error.headers)
