"""HTTP API, compatible with OpenAI's API."""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.telemetry import TelemetryConfig
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import TypeAdapter
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest

from gateway.api.access import Authentication, foreign_name
from gateway.api.adapter_api import add_adapters
from gateway.api.anthropic.errors import message_error
from gateway.api.anthropic.message_api import ID, MESSAGES, add_messages
from gateway.api.bodies import Entrance
from gateway.api.docs import add_docs
from gateway.api.endpoints import CHATS, COMPLETIONS
from gateway.api.head_requests import HeadRequests
from gateway.api.limit_headers import TENANT, LimitHeaders
from gateway.api.message_json import as_json
from gateway.api.openai.bodies import Parsed, headers_of, parsed, reported_seed
from gateway.api.openai.chat import ChatRequest
from gateway.api.openai.chat_answer import ChatAnswer
from gateway.api.openai.chat_template import ChatTemplate
from gateway.api.openai.completions import CompletionAnswer, CompletionRequest
from gateway.api.openai.fields import IGNORED_HEADER, SEED_HEADER
from gateway.api.openai.http_errors import Shape, answer_errors
from gateway.api.openai.rendering import ChatPrompts
from gateway.api.openai.response_api import RESPONSES, add_responses
from gateway.api.openai.schemas import GenerationRequest
from gateway.api.openai.stream import events, is_long
from gateway.api.page import add_page
from gateway.api.request_ids import KEY, RequestIds
from gateway.api.service_types import Health, Model, Models, WorkerHealth
from gateway.api.text_api import add_texts
from gateway.errors import UnauthenticatedError
from gateway.generation.generation import Generation
from gateway.generation.request import Prepared
from gateway.generation.vocabulary import TokenBytes
from gateway.observe.loads import loads

HEALTH = TypeAdapter(Health)
SECRET = {"api_key_digests", "tenants", "tenant_keys", "receipt_key"}  # settings that /health does not show
OTHER_KEY = "x-api-key"  # header in which clients of Anthropic's API send a key
GENERATING = (COMPLETIONS, CHATS, RESPONSES, MESSAGES)  # other paths would only clutter the traces
TELEMETRY: TelemetryConfig = {
    "operation_spans": False,
    "metrics": False,
    "logs": False,
    "auto_configure": False,
    "exclude": lambda scope: scope["path"] not in GENERATING,
}


def build(
    generation: Generation,
    template: ChatTemplate,
    authentication: Authentication,
    recorded: Callable[[], bytes] = bytes,
) -> FastAPI:
    """Returns the app.

    recorded: returns the gateway's metrics as Prometheus text; default: no metrics.
    """
    app = FastAPI(
        title="Outrider",
        version=version("outrider"),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        telemetry=TELEMETRY,
    )
    started = int(time.time())
    settings = generation.settings
    tokens = TokenBytes(generation.tokenizer)
    entrance = Entrance(generation)

    def is_known(request: HttpRequest) -> str | None:
        host = request.client.host if request.client else None
        headers = request.headers
        authorization = headers.get("authorization")
        if authorization is None and OTHER_KEY in headers:
            authorization = f"Bearer {headers[OTHER_KEY]}"
        caller = authentication.check(authorization, host, foreign_name(headers, settings.allowed_origins))
        if request.url.path in GENERATING:
            request.scope[TENANT] = generation.tenants.of(caller)
        return caller

    prompts = ChatPrompts.of(template, generation)
    Caller = Annotated[str | None, Depends(is_known)]  # noqa: N806  a type

    async def respond(
        asked: Parsed[Any], prepared: Prepared, answer: CompletionAnswer | ChatAnswer
    ) -> Response:
        body: GenerationRequest = asked.body
        chunks = generation.chunks(prepared, answer.name if body.store else "")
        headers = headers_of(asked, answer.seed)
        if not body.stream:
            async with aclosing(chunks):
                answered = [chunk async for chunk in chunks]

            def whole() -> Response:
                return JSONResponse(answer.whole(answered), headers=headers)

            return await asyncio.to_thread(whole) if is_long(answered) else whole()
        first = await anext(chunks)  # until the first chunk, an error can still set the status
        stream = events(first, chunks, answer, body.stream_options, tokens, prepared.prompt_tokens)
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    @app.post(COMPLETIONS)
    async def completions(request: HttpRequest, caller: Caller) -> Response:
        """Continues texts; as server-sent events with `stream`."""
        async with entrance.body(request) as body:
            asked = await parsed(CompletionRequest, body.text, settings.unknown_fields)
            prepared = await generation.prepare(asked.body.prepared(), caller, body.deadline)
            echoes = await asked.body.echoes(prepared, generation)
        prepared.server_span.set_attribute(KEY, request.scope[KEY])
        seed = reported_seed(asked.body, prepared)
        answer = CompletionAnswer(asked.body, prepared, tokens, seed, echoes)
        return await respond(asked, prepared, answer)

    @app.post(CHATS)
    async def chat(request: HttpRequest, caller: Caller) -> Response:
        """Answers a conversation; as server-sent events with `stream`."""
        async with entrance.body(request) as body:
            asked = await parsed(ChatRequest, body.text, settings.unknown_fields)
            conversation = await asked.body.chat(prompts)
            asked = asked.also_ignoring(conversation.prompt.left_out)
            prepared = await asked.body.prepared(generation, conversation, caller, body.deadline)
        prepared.server_span.set_attribute(KEY, request.scope[KEY])
        seed = reported_seed(asked.body, prepared)
        answer = ChatAnswer(asked.body, prepared, tokens, seed, conversation)
        return await respond(asked, prepared, answer)

    @app.get("/v1/models", dependencies=[Depends(is_known)])
    async def models() -> Models:
        """Returns the model that is served, and its adapters."""
        names = (settings.model, *await generation.adapters.served())
        return {"object": "list", "data": [described(name) for name in names]}

    @app.get("/v1/models/{name:path}", dependencies=[Depends(is_known)])
    async def model(name: str) -> Model:
        """Returns the model of this name, if it is served."""
        await generation.adapters.find(name)
        return described(name)

    def described(name: str) -> Model:
        has_target = generation.fleet.workers("target")
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "outrider",
            "root": name,
            "parent": None if name == settings.model else settings.model,
            "max_model_len": generation.limits.max_length() if has_target else None,
        }

    @app.get("/health")
    async def health(request: HttpRequest) -> JSONResponse:
        """Answers 200 when a request can be answered now. Callers with access get workers and settings."""
        missing = generation.readiness.missing()
        body: Health = {"status": missing or "ok"}
        try:
            is_known(request)
        except UnauthenticatedError:
            return JSONResponse(body, status_code=503 if missing else 200)
        body["workers"] = [
            WorkerHealth(**vars(link.worker), no_drafts_because=link.no_drafts_because)
            for link in generation.fleet.links()
        ]
        body["access"] = authentication.policy
        body["pace"] = generation.paces.settings
        if generation.refused_live is not None:
            body["refused_live_settings"] = generation.refused_live
        body["sampling_defaults"] = dict(generation.sampling_defaults)
        in_force = generation.settings
        body["drafters"] = {row.name: row.meaning for row in in_force.roster}
        body["gateway"] = in_force.model_dump(exclude=SECRET)
        return JSONResponse(HEALTH.dump_python(body, mode="json"), status_code=503 if missing else 200)

    @app.get("/loads", dependencies=[Depends(is_known)])
    async def get_loads() -> dict[str, Any]:
        """Returns the reply of the gRPC API's GetLoads as JSON."""
        return as_json(loads(generation))

    @app.get("/metrics", dependencies=[Depends(is_known)])
    async def metrics() -> Response:
        """Returns the metrics of this gateway as Prometheus text."""
        return Response(recorded(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    add_responses(app, generation, prompts, is_known, entrance)
    add_messages(app, generation, prompts, is_known, entrance)
    add_texts(app, generation, prompts, is_known, entrance)
    add_adapters(app, generation, is_known, entrance)
    add_page(app)
    add_docs(app)
    answer_errors(app, {MESSAGES: Shape(message_error, ID)})
    app.add_middleware(LimitHeaders, MESSAGES)
    app.add_middleware(RequestIds)
    app.add_middleware(HeadRequests)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[SEED_HEADER, IGNORED_HEADER],
        )
    return app
