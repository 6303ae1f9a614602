"""Endpoints of OpenAI's Responses API: responses, and stored responses."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse, Response
from pydantic import TypeAdapter
from pydantic_core import from_json
from starlette.requests import Request as HttpRequest

from gateway.api.bodies import Entrance
from gateway.api.openai.bodies import headers_of, parsed, reported_seed
from gateway.api.openai.rendering import ChatPrompts
from gateway.api.openai.response_events import ResponseAnswer, finished, streamed
from gateway.api.openai.response_types import DeletedResponse, ResponseItems
from gateway.api.openai.responses import Item, ResponseRequest, own_name, repeated_fields
from gateway.api.request_ids import KEY
from gateway.errors import InvalidRequestError, UnknownResponseError
from gateway.generation.answer_store import AnswerStore, answers_entry
from gateway.generation.generation import Generation
from gateway.generation.request import Prepared

RESPONSES = "/v1/responses"
RESPONSE, CANCEL, ITEMS = (f"{RESPONSES}/{{name}}{part}" for part in ("", "/cancel", "/input_items"))
NOT_KEPT = "{!r} is not kept: it is unknown, too old, or was sent with store=false"
NOT_CANCELLED = "only responses that run in the background can be cancelled, and none do"
KEPT_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def add_responses(
    app: FastAPI,
    generation: Generation,
    prompts: ChatPrompts,
    is_known: Any,
    entrance: Entrance,
) -> None:
    """Adds the endpoints. is_known: dependency that refuses callers without access."""
    settings = generation.settings
    Caller = Annotated[str | None, Depends(is_known)]  # noqa: N806  a type

    async def kept(caller: str | None, name: str) -> dict[str, Any]:
        """Returns the stored entry of a response. Raises UnknownResponseError."""
        entry = None if caller is None else await generation.answers.get(caller, name)
        found: dict[str, Any] = {} if entry is None else from_json(entry)
        if "response" not in found:  # an answer of another endpoint is no response
            raise UnknownResponseError("response_id", NOT_KEPT.format(name))
        return found

    @app.post(RESPONSES)
    async def responses(request: HttpRequest, caller: Caller) -> Response:
        """Answers a conversation in the form of OpenAI's Responses API, and stores it if `store` is true."""
        async with entrance.body(request) as body:
            asked = await parsed(ResponseRequest, body.text, settings.unknown_fields)
            earlier: list[Item] = []
            if (previous := asked.body.previous_response_id) is not None:
                try:
                    earlier = KEPT_ITEMS.validate_python((await kept(caller, previous))["conversation"])
                except UnknownResponseError as error:  # the path is right, a field of the body is wrong
                    raise InvalidRequestError("previous_response_id", error.message) from error
            try:
                as_chat = asked.body.as_chat(earlier)
                conversation = await as_chat.chat(prompts)
                asked = asked.also_ignoring(map(own_name, conversation.prompt.left_out))
                prepared = await as_chat.prepared(generation, conversation, caller, body.deadline)
            except InvalidRequestError as error:
                raise error.renamed(own_name) from error
        prepared.server_span.set_attribute(KEY, request.scope[KEY])
        seed, chunks = reported_seed(asked.body, prepared), generation.chunks(prepared)
        # Callers without a name cannot be told apart, so nothing is stored for them.
        keeps = asked.body.store and caller is not None and settings.stored_answer_bytes > 0
        asked = replace(asked, body=asked.body.model_copy(update={"store": keeps}))
        answer = ResponseAnswer(
            prepared.model,
            conversation.parser(),
            seed,
            {
                **repeated_fields(asked.body, prepared.sequences[0].sampling),
                **asked.body.told_tier(prepared.priority),
            },
        )
        keep = None
        if keeps and caller:
            keep = _keeping(generation.answers, caller, [*earlier], asked.body, answer, prepared)
        if asked.body.stream:
            return await streamed(chunks, answer, headers_of(asked, seed), keep)
        await finished(chunks, answer)
        if keep is not None:
            await keep()
        return JSONResponse(answer.response, headers=headers_of(asked, seed))

    @app.get(RESPONSE)
    async def response(name: str, caller: Caller) -> JSONResponse:
        """Returns a stored response."""
        return JSONResponse((await kept(caller, name))["response"])

    @app.get(ITEMS)
    async def input_items(name: str, caller: Caller) -> ResponseItems:
        """Returns the input items of a stored response, the newest first."""
        items = (await kept(caller, name))["input"][::-1]
        return {"object": "list", "data": items, "has_more": False}

    @app.delete(RESPONSE)
    async def delete(name: str, caller: Caller) -> DeletedResponse:
        """Deletes a stored response, or another stored answer."""
        if caller is None or not await generation.answers.delete(caller, name):
            raise UnknownResponseError("response_id", NOT_KEPT.format(name))
        return {"id": name, "object": "response", "deleted": True}

    @app.post(CANCEL)
    async def cancel(name: str, caller: Caller) -> Response:
        """Refuses to cancel: every response ends with its connection."""
        await kept(caller, name)
        raise InvalidRequestError("response_id", NOT_CANCELLED)


def _keeping(
    store: AnswerStore,
    caller: str,
    earlier: list[Item],
    body: ResponseRequest,
    answer: ResponseAnswer,
    prepared: Prepared,
) -> Callable[[], Awaitable[None]]:
    """Returns a function that stores the answer, once complete, with the conversation up to its end."""

    async def keep() -> None:
        response = answer.response
        asked = KEPT_ITEMS.dump_python(body.input, mode="json", exclude_unset=True)
        before = KEPT_ITEMS.dump_python(earlier, mode="json", exclude_unset=True)
        entry = answers_entry(
            (sequence.generated for sequence in prepared.sequences),
            response=response,
            input=asked,
            conversation=[*before, *asked, *response["output"]],
        )
        await store.put(caller, response["id"], entry)

    return keep
