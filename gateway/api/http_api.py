"""OpenAI-compatible HTTP."""

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, Protocol

from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.telemetry import TelemetryConfig
from google.protobuf.json_format import MessageToDict
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.access import Authentication
from gateway.api.details import details_body
from gateway.api.openai.bodies import described, parsed, told_seed
from gateway.api.openai.chat import ChatAnswer, ChatRequest
from gateway.api.openai.chat_template import ChatTemplate
from gateway.api.openai.completions import CompletionAnswer, CompletionRequest
from gateway.api.openai.schemas import GenerationRequest, StreamOptions, error_body, invalid, token_counts
from gateway.api.page import add_page
from gateway.errors import (
    DEFECT,
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
from gateway.generation.generation import Generation
from gateway.generation.request import Chunk, Prepared, Usage
from gateway.generation.token_bytes import TokenBytes
from gateway.observe.loads import loads
from outrider.drafters.registry import drafters

logger = logging.getLogger("ray.serve")

LONG_ANSWER = 1024  # tokens, or log-probabilities of tokens, which take about a millisecond to write
SEED_HEADER = "outrider-seed"  # repeating the request with this seed gives the same text
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TRACED = (COMPLETIONS, CHATS)  # other paths would only fill the traces
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

    async def respond(prepared: Prepared, answer: Answer, body: GenerationRequest, seed: int) -> Response:
        chunks = generation.chunks(prepared)
        headers = {SEED_HEADER: str(seed)}
        if not body.stream:
            async with aclosing(chunks):
                said = [chunk async for chunk in chunks]

            def whole() -> Response:
                return JSONResponse(answer.whole(said, len(prepared.sequences)), headers=headers)

            return await asyncio.to_thread(whole) if _is_long(said) else whole()
        # The first chunk is waited for: until then an error can still be told by the status.
        first = await anext(chunks)
        events = _events(
            first, chunks, answer, body.stream_options, tokens, len(prepared.sequences[0].prompt)
        )
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    @app.post(
        COMPLETIONS, dependencies=[Depends(is_known)], openapi_extra=described(CompletionRequest, COMPLETIONS)
    )
    async def completions(request: HttpRequest) -> Response:
        body = await parsed(CompletionRequest, request)
        prepared = await generation.prepare(body.prepared())
        seed = told_seed(body, prepared)
        echo = await body.echoed(generation.tokenization)
        answer = CompletionAnswer(settings.model, prepared, tokens, seed, echo)
        return await respond(prepared, answer, body, seed)

    @app.post(CHATS, dependencies=[Depends(is_known)], openapi_extra=described(ChatRequest, CHATS))
    async def chat(request: HttpRequest) -> Response:
        body = await parsed(ChatRequest, request)
        prepared = await body.prepared(generation, template)
        seed = told_seed(body, prepared)
        answer = ChatAnswer(settings.model, prepared, tokens, seed)
        return await respond(prepared, answer, body, seed)

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
        body["drafters"] = {row.name: row.meaning for row in drafters()}
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
    prompt_tokens: int,
) -> AsyncIterator[str]:
    """Server-sent events, closed by [DONE]. What goes wrong on the way becomes an event of its own."""
    chunk, written = first, 0

    def counted(body: dict[str, Any]) -> dict[str, Any]:
        """With the tokens so far, where every event is to have them."""
        if not (options.include_usage and options.continuous_usage_stats):
            return body
        return {**body, "usage": token_counts(prompt_tokens, written)}

    async with aclosing(chunks):
        try:
            for opening in answer.opening():
                yield _event(counted(opening))
            while True:
                body = answer.chunk(chunk)
                written += len(chunk.tokens)
                if options.include_rounds:
                    body = body or {"choices": []}
                    body["outrider"] = body.get("outrider", {}) | details_body(chunk, tokens)
                if body is not None:
                    yield _event(counted(body))
                if chunk.usage is not None:
                    break
                chunk = await anext(chunks)
            if options.include_usage:
                yield _event(answer.usage(chunk.usage))
        except GatewayError as error:
            yield _event(_error(error)[1])
        except Exception:
            logger.exception("a stream of events failed")
            yield _event(error_body(DEFECT, type_="server_error"))
    yield "data: [DONE]\n\n"


def _is_long(chunks: list[Chunk]) -> bool:
    """Whether writing it down takes so long that a thread should."""
    tokens = [token for chunk in chunks for token in chunk.tokens]
    return (
        len(tokens) + sum(len(token.logprobs.token_ids) for token in tokens if token.logprobs) > LONG_ANSWER
    )


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

    @app.exception_handler(Exception)
    async def defect(request: HttpRequest, error: Exception) -> JSONResponse:
        """The server logs it."""
        return JSONResponse(error_body(DEFECT, type_="server_error"), status_code=500)

    @app.exception_handler(ValidationError)
    async def contradictory(request: HttpRequest, error: Exception) -> JSONResponse:
        assert isinstance(error, ValidationError)
        return await refused(request, invalid(error))

    @app.exception_handler(HTTPException)
    async def no_such_thing(request: HttpRequest, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        body = error_body(str(error.detail), type_="invalid_request_error")
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
