"""OpenAI-compatible HTTP."""

import json
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, Protocol

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.telemetry import TelemetryConfig
from google.protobuf.json_format import MessageToDict
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.auth import Authentication
from gateway.chat import ChatAnswer, ChatRequest
from gateway.chat_template import ChatTemplate
from gateway.completions import CompletionAnswer, CompletionRequest
from gateway.details import details_body
from gateway.errors import (
    DeadlineError,
    GatewayError,
    InvalidRequestError,
    OverloadedError,
    SequenceFailedError,
    SequenceLostError,
    UnauthenticatedError,
    UnknownModelError,
    WorkerLostError,
)
from gateway.generation import Chunk, Generation, Prepared, Usage
from gateway.loads import loads
from gateway.page import add_page
from gateway.schemas import GenerationRequest, StreamOptions, error_body, first_error, invalid
from gateway.token_bytes import TokenBytes

SEED_HEADER = "outrider-seed"  # repeating the request with this seed gives the same text
TRACED = ("/v1/completions", "/v1/chat/completions")  # other paths would only fill the traces
TELEMETRY: TelemetryConfig = {
    "operation_spans": False,
    "metrics": False,
    "logs": False,
    "auto_configure": False,
    "exclude": lambda scope: scope["path"] not in TRACED,
}
RETRY_LOST_S = 1  # after which a worker may have been replaced

STATUS: dict[type[GatewayError], tuple[int, str]] = {
    InvalidRequestError: (400, "invalid_request_error"),
    UnknownModelError: (404, "invalid_request_error"),
    UnauthenticatedError: (401, "authentication_error"),
    OverloadedError: (429, "rate_limit_error"),
    DeadlineError: (504, "server_error"),
    SequenceFailedError: (500, "server_error"),
    WorkerLostError: (503, "server_error"),
    SequenceLostError: (503, "server_error"),
}


class Answer(Protocol):
    """The bodies of one endpoint."""

    def opening(self) -> list[dict[str, Any]]: ...
    def chunk(self, chunk: Chunk) -> dict[str, Any] | None: ...
    def usage(self, usage: Usage) -> dict[str, Any]: ...
    def whole(self, chunks: list[Chunk], count: int) -> dict[str, Any]: ...


def build(generation: Generation, template: ChatTemplate, authentication: Authentication) -> FastAPI:
    app = FastAPI(title="Outrider", docs_url=None, redoc_url=None, telemetry=TELEMETRY)
    started = int(time.time())
    settings = generation.settings
    tokens = TokenBytes(generation.tokenizer)

    def is_known(request: HttpRequest) -> None:
        host = request.client.host if request.client else None
        authentication.check(request.headers.get("authorization"), host)

    async def respond(prepared: Prepared, answer: Answer, body: GenerationRequest) -> Response:
        chunks = generation.chunks(prepared)
        headers = {SEED_HEADER: str(prepared.seed)}
        if not body.stream:
            async with aclosing(chunks):
                whole = answer.whole([chunk async for chunk in chunks], len(prepared.sequences))
            return JSONResponse(whole, headers=headers)
        # The first chunk is waited for: until then an error can still be told by the status.
        first = await anext(chunks)
        events = _events(first, chunks, answer, body.stream_options, tokens)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    @app.post("/v1/completions", dependencies=[Depends(is_known)])
    async def completions(body: CompletionRequest) -> Response:
        prepared = generation.prepare(body.prepared())
        answer = CompletionAnswer(settings.model, prepared, tokens, body.echoed(generation.tokenizer))
        return await respond(prepared, answer, body)

    @app.post("/v1/chat/completions", dependencies=[Depends(is_known)])
    async def chat(body: ChatRequest) -> Response:
        prepared = body.prepared(generation, template)
        answer = ChatAnswer(settings.model, prepared, tokens)
        return await respond(prepared, answer, body)

    @app.get("/v1/models", dependencies=[Depends(is_known)])
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [await model(settings.model)]}

    @app.get("/v1/models/{name:path}", dependencies=[Depends(is_known)])
    async def model(name: str) -> dict[str, Any]:
        if name != settings.model:
            raise UnknownModelError("model", f"{name!r} is not served, {settings.model!r} is")
        return {"id": name, "object": "model", "created": started, "owned_by": "outrider"}

    @app.get("/health")
    async def health(request: HttpRequest) -> JSONResponse:
        """200 when a request can be answered now; to those who may ask also workers and the pace in force."""
        ready = bool(generation.fleet.workers("target"))
        body: dict[str, Any] = {"status": "ok" if ready else "no target worker is ready"}
        try:
            is_known(request)
        except UnauthenticatedError:
            return JSONResponse(body, status_code=200 if ready else 503)
        body["workers"] = [asdict(worker) for worker in generation.fleet.workers()]
        body["pace"] = generation.paces.settings.model_dump()
        body["gateway"] = settings.model_dump(exclude={"api_key_digests"})
        return JSONResponse(body, status_code=200 if ready else 503)

    @app.get("/loads", dependencies=[Depends(is_known)])
    async def busy() -> dict[str, Any]:
        """GetLoads of the gRPC API as JSON."""
        return MessageToDict(
            loads(generation), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )

    add_page(app)
    _answer_errors(app)
    app.add_middleware(BodyLimit, max_bytes=settings.max_message_bytes)
    return app


async def _events(
    first: Chunk,
    chunks: AsyncGenerator[Chunk, None],
    answer: Answer,
    options: StreamOptions,
    tokens: TokenBytes,
) -> AsyncIterator[str]:
    """Server-sent events, closed by [DONE]. What goes wrong on the way becomes an event of its own."""
    chunk = first
    async with aclosing(chunks):
        try:
            for opening in answer.opening():
                yield _event(opening)
            while True:
                body = answer.chunk(chunk)
                if options.include_rounds:
                    body = body or {"choices": []}
                    body["outrider"] = body.get("outrider", {}) | details_body(chunk, tokens)
                if body is not None:
                    yield _event(body)
                if chunk.usage is not None:
                    break
                chunk = await anext(chunks)
            if options.include_usage:
                yield _event(answer.usage(chunk.usage))
        except GatewayError as error:
            yield _event(_error(error)[1])
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _error(error: GatewayError) -> tuple[int, dict[str, Any]]:
    """Status and body in OpenAI's shape."""
    status, type_ = STATUS[type(error)]
    field = error.field if isinstance(error, InvalidRequestError) else None
    code = {401: "invalid_api_key", 404: "model_not_found"}.get(status)
    return status, error_body(str(error), type_=type_, param=field, code=code)


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(GatewayError)
    async def refused(request: HttpRequest, error: Exception) -> JSONResponse:
        assert isinstance(error, GatewayError)
        status, body = _error(error)
        headers = {}
        if isinstance(error, OverloadedError):
            headers["Retry-After"] = str(math.ceil(error.retry_after_s))
        elif isinstance(error, WorkerLostError):
            headers["Retry-After"] = str(RETRY_LOST_S)
        return JSONResponse(body, status_code=status, headers=headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: HttpRequest, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return await refused(request, InvalidRequestError(*first_error(error.errors())))

    @app.exception_handler(ValidationError)
    async def contradictory(request: HttpRequest, error: Exception) -> JSONResponse:
        assert isinstance(error, ValidationError)
        return await refused(request, invalid(error))

    @app.exception_handler(HTTPException)
    async def no_such_thing(request: HttpRequest, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        body = error_body(str(error.detail), type_="invalid_request_error", param="body")
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)


class BodyLimit:
    """ASGI middleware: a longer body is refused while it is read, whatever length was announced."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_bytes:
                raise HTTPException(413, f"the body exceeds {self._max_bytes} bytes")
            return message

        await self._app(scope, counted, send)
