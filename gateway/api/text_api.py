"""Endpoints that need no worker: tokenize, detokenize, version and ping."""

from importlib.metadata import version
from typing import Any

from fastapi import Depends, FastAPI, Response
from pydantic import Field, model_validator
from starlette.requests import Request as HttpRequest

from gateway.api.bodies import Entrance
from gateway.api.openai.bodies import parsed
from gateway.api.openai.chat import MAX_KWARGS
from gateway.api.openai.field_types import Label, NullIsLeftOut, Text
from gateway.api.openai.messages import MAX_MESSAGES, Message
from gateway.api.openai.rendering import ChatPrompts
from gateway.api.openai.schemas import TokenIds
from gateway.api.openai.tools import MAX_TOOLS, Tool
from gateway.api.service_types import Detokenized, Tokenized, Version
from gateway.generation.generation import Generation

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


class TokenizeRequest(NullIsLeftOut):
    """Request for the token ids of a text, or of a chat as its template writes it."""

    model: Text | None = None
    prompt: Text | None = None
    messages: list[Message] | None = Field(
        default=None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True
    )
    add_special_tokens: bool | None = None  # None: True for a text, False for a chat
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)
    chat_template_kwargs: dict[Label, Any] = Field(default_factory=dict, max_length=MAX_KWARGS)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_one_text(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages is accepted")
        return self


class DetokenizeRequest(NullIsLeftOut):
    model: Text | None = None
    tokens: TokenIds


def add_texts(
    app: FastAPI, generation: Generation, prompts: ChatPrompts, is_known: Any, entrance: Entrance
) -> None:
    """Adds the endpoints. is_known: dependency that refuses callers without access."""
    settings = generation.settings

    @app.post(TOKENIZE, dependencies=[Depends(is_known)])
    async def tokenize(request: HttpRequest) -> Tokenized:
        """Returns the token ids of a text, or of a chat."""
        async with entrance.body(request) as came:
            body = (await parsed(TokenizeRequest, came.text, settings.unknown_fields)).body
            await generation.adapters.find(body.model)
            tokenization = generation.tokenization
            if body.messages is None:
                assert body.prompt is not None
                generation.limits.check_text("prompt", body.prompt)
                adds_special = body.add_special_tokens is not False
                ids = (await tokenization.encode(body.prompt, add_special_tokens=adds_special)).ids
            else:
                chat = await prompts.rendered(
                    body.messages,
                    tools=[tool.plain() for tool in body.tools],
                    begin_answer=body.add_generation_prompt,
                    continues=body.continue_final_message,
                    more=body.chat_template_kwargs,
                )
                generation.limits.check_text("messages", "".join(chat.pieces))
                adds_special = body.add_special_tokens is True
                ids = await tokenization.encode_apart(chat.pieces, add_special_tokens=adds_special)
        answer: Tokenized = {
            "count": len(ids),
            "max_model_len": generation.limits.max_length(),
            "tokens": ids,
        }
        if body.return_token_strs:
            answer["token_strs"] = [generation.tokenizer.id_to_token(token_id) for token_id in ids]
        return answer

    @app.post(DETOKENIZE, dependencies=[Depends(is_known)])
    async def detokenize(request: HttpRequest) -> Detokenized:
        """Returns the text of token ids, special tokens included."""
        async with entrance.body(request) as came:
            body = (await parsed(DetokenizeRequest, came.text, settings.unknown_fields)).body
            await generation.adapters.find(body.model)
            generation.limits.check_length("tokens", body.tokens)
            generation.limits.check_ids("tokens", body.tokens)
            text = await generation.tokenization.decode(body.tokens, skip_special_tokens=False)
        return {"prompt": text}

    @app.get("/version")
    async def get_version() -> Version:
        """Returns the version of Outrider."""
        return {"version": version("outrider")}

    @app.get("/ping")
    async def ping() -> Response:
        """Answers 200 if a request can be answered now, else 503; without a body."""
        return Response(status_code=503 if generation.readiness.missing() else 200)
