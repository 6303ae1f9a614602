"""What goes wrong with a request over HTTP: a status, and a body in OpenAI's shape."""

import math

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from gateway.api.openai.answer_types import Error, ErrorCode, ErrorType
from gateway.api.openai.schemas import error_body, invalid
from gateway.errors import (
    DEFECT,
    DeadlineError,
    GatewayError,
    GenerationFailedError,
    InvalidRequestError,
    OverloadedError,
    SequenceLostError,
    UnauthenticatedError,
    UnknownModelError,
    WorkerLostError,
)

RETRY_LOST_S = 1  # after which a worker may have been replaced

STATUS: dict[type[GatewayError], tuple[int, ErrorType]] = {
    InvalidRequestError: (400, "invalid_request_error"),
    UnknownModelError: (404, "invalid_request_error"),
    UnauthenticatedError: (401, "authentication_error"),
    OverloadedError: (429, "rate_limit_error"),
    DeadlineError: (504, "server_error"),
    GenerationFailedError: (500, "server_error"),
    WorkerLostError: (503, "server_error"),
    SequenceLostError: (503, "server_error"),
}
CODES: dict[int, ErrorCode] = {401: "invalid_api_key", 404: "model_not_found"}


def told(error: GatewayError) -> tuple[int, Error]:
    """Status and body."""
    status, type_ = STATUS[type(error)]
    field = error.field if isinstance(error, InvalidRequestError) else None
    return status, error_body(str(error), type_=type_, param=field, code=CODES.get(status))


def answer_errors(app: FastAPI) -> None:
    """Whatever an endpoint raises becomes an answer."""

    @app.exception_handler(GatewayError)
    async def refused(request: HttpRequest, error: Exception) -> JSONResponse:
        assert isinstance(error, GatewayError)
        status, body = told(error)
        headers = {}
        if isinstance(error, OverloadedError):
            headers["Retry-After"] = str(math.ceil(error.retry_after_s))
        elif isinstance(error, WorkerLostError):
            headers["Retry-After"] = str(RETRY_LOST_S)
        return JSONResponse(body, status_code=status, headers=headers)

    @app.exception_handler(Exception)
    async def defect(request: HttpRequest, error: Exception) -> JSONResponse:
        """The server logs it."""
        body = error_body(DEFECT, type_="server_error")
        return JSONResponse(body, status_code=500)

    @app.exception_handler(ValidationError)
    async def contradictory(request: HttpRequest, error: Exception) -> JSONResponse:
        assert isinstance(error, ValidationError)
        return await refused(request, invalid(error))

    @app.exception_handler(HTTPException)
    async def no_such_thing(request: HttpRequest, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        body = error_body(str(error.detail), type_="invalid_request_error")
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)
