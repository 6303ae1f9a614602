"""OpenAI-compatible HTTP."""

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import Request as HttpRequest

from gateway.errors import InvalidRequestError, UnknownModelError, WorkerLostError
from gateway.generation import Chunk, Generation
from gateway.schemas import Completion, CompletionRequest, error_body, first_error

SEED_HEADER = "outrider-seed"  # repeating the request with this seed gives the same text


def build(generation: Generation) -> FastAPI:
    app = FastAPI(title="Outrider", docs_url=None, redoc_url=None)
    started = int(time.time())

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest) -> Response:
        prepared = generation.prepare(body.request())
        completion = Completion(generation.settings.model, prepared.seed)
        headers = {SEED_HEADER: str(prepared.seed)}
        chunks = generation.chunks(prepared)
        if not body.stream:
            return JSONResponse(completion.whole([chunk async for chunk in chunks]), headers=headers)
        # The first chunk is waited for: until then an error can still be told by the status.
        first = await anext(chunks)
        events = _events(first, chunks, completion, include_usage=body.stream_options.include_usage)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {
            "id": generation.settings.model,
            "object": "model",
            "created": started,
            "owned_by": "outrider",
        }
        return {"object": "list", "data": [model]}

    @app.get("/health")
    async def health() -> JSONResponse:
        """200 when a request can be answered now; the workers and their process ids either way."""
        ready = bool(generation.fleet.workers("target"))
        status = "ok" if ready else "no target worker is ready"
        workers = [asdict(worker) for worker in generation.fleet.workers()]
        return JSONResponse({"status": status, "workers": workers}, status_code=200 if ready else 503)

    _answer_errors(app)
    return app


async def _events(
    first: Chunk, chunks: AsyncGenerator[Chunk, None], completion: Completion, *, include_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events, closed by [DONE]. A worker lost on the way becomes an event of its own."""
    chunk = first
    async with aclosing(chunks):
        try:
            while chunk.usage is None:
                if chunk.text:
                    yield _event(completion.body(chunk))
                chunk = await anext(chunks)
            yield _event(completion.body(chunk))
            if include_usage:
                yield _event(completion.usage_body(chunk.usage))
        except WorkerLostError as lost:
            yield _event(error_body(str(lost), type_="server_error"))
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _answer_errors(app: FastAPI) -> None:
    """Every refusal in OpenAI's shape."""

    @app.exception_handler(RequestValidationError)
    async def malformed(request: HttpRequest, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        field, message = first_error(error.errors())
        body = error_body(f"{field}: {message}", type_="invalid_request_error", param=field)
        return JSONResponse(body, status_code=400)

    @app.exception_handler(InvalidRequestError)
    async def invalid(request: HttpRequest, error: Exception) -> JSONResponse:
        assert isinstance(error, InvalidRequestError)
        unknown = isinstance(error, UnknownModelError)
        code = "model_not_found" if unknown else None
        body = error_body(str(error), type_="invalid_request_error", param=error.field, code=code)
        return JSONResponse(body, status_code=404 if unknown else 400)

    @app.exception_handler(WorkerLostError)
    async def lost(request: HttpRequest, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(str(error), type_="server_error"), status_code=503)
