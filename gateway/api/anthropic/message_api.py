"""Endpoints of Anthropic's Messages API."""

from typing import Annotated, Any

from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse, Response
from starlette.requests import Request as HttpRequest

from gateway.api.anthropic.answer import MessageAnswer
from gateway.api.anthropic.bodies import CountRequest, MessagesRequest, own_name
from gateway.api.anthropic.types import CountedTokens
from gateway.api.bodies import Entrance
from gateway.api.openai.bodies import headers_of, parsed, reported_seed
from gateway.api.openai.rendering import ChatPrompts
from gateway.api.openai.response_events import finished, streamed
from gateway.api.request_ids import KEY
from gateway.errors import InvalidRequestError
from gateway.generation.generation import Generation

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
ID = "request-id"  # header in which clients of this API look for the request's id


def add_messages(
    app: FastAPI, generation: Generation, prompts: ChatPrompts, is_known: Any, entrance: Entrance
) -> None:
    """Adds the endpoints. is_known: dependency that returns the caller, if it has access."""
    settings = generation.settings
    variables = prompts.template.asks_for
    Caller = Annotated[str | None, Depends(is_known)]  # noqa: N806  a type

    @app.post(MESSAGES)
    async def messages(request: HttpRequest, caller: Caller) -> Response:
        """Answers a conversation in the form of Anthropic's API; as server-sent events with `stream`."""
        async with entrance.body(request) as body:
            asked = await parsed(MessagesRequest, body.text, settings.unknown_fields)
            try:
                as_chat = asked.body.as_chat(variables[bool(asked.body.tools)])
                conversation = await as_chat.chat(prompts)
                asked = asked.also_ignoring(map(own_name, conversation.prompt.left_out))
                prepared = await as_chat.prepared(generation, conversation, caller, body.deadline, fits=True)
            except InvalidRequestError as error:
                raise error.renamed(own_name) from error
        prepared.server_span.set_attribute(KEY, request.scope[KEY])
        seed, chunks = reported_seed(as_chat, prepared), generation.chunks(prepared)
        answer = MessageAnswer(
            conversation.parser(),
            prepared,
            seed,
            generation.limits.max_length(),
            asked.body.told_tier(prepared.priority),
            shows_thoughts=asked.body.thinking.display != "omitted",
        )
        headers = {**headers_of(asked, seed), ID: request.scope[KEY]}
        if asked.body.stream:
            return await streamed(chunks, answer, headers)
        await finished(chunks, answer)
        return JSONResponse(answer.message, headers=headers)

    @app.post(COUNT_TOKENS, dependencies=[Depends(is_known)])
    async def count_tokens(request: HttpRequest) -> CountedTokens:
        """Counts the tokens of a conversation, its tools included."""
        async with entrance.body(request) as came:
            body = (await parsed(CountRequest, came.text, settings.unknown_fields)).body
            await generation.adapters.find(body.model)
            try:
                conversation = await body.as_chat(variables[bool(body.tools)]).chat(prompts)
            except InvalidRequestError as error:
                raise error.renamed(own_name) from error
            ids = await generation.prompts.of_chat(conversation.prompt.pieces, may_be_long=True)
        return {"input_tokens": len(ids)}
