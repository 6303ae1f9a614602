"""Chats of the gRPC API: text messages, which the model's chat template turns into a prompt."""

from dataclasses import replace

from pydantic import Field, ValidationError

from gateway.api.openai.field_types import Strict
from gateway.api.openai.messages import MAX_MESSAGES, Message
from gateway.api.openai.rendering import ChatPrompts
from gateway.api.openai.schemas import invalid
from gateway.generation.generation import Generation
from gateway.generation.request import Request
from outrider.decoding.settings import Sampling
from protos import generation_pb2
from protos.conversions import set_fields


class TextChat(Strict):
    """Chat of text messages."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)


async def in_chat(
    request: Request, chat: generation_pb2.TextMessages, prompts: ChatPrompts, generation: Generation
) -> Request:
    """Returns the request with the chat as its prompt. Without max_tokens, the answer may fill the context.

    Raises:
        InvalidRequestError: a message is invalid, or the chat template refuses the chat.
    """
    try:
        read = TextChat.model_validate(
            {"messages": [{"content": "", **set_fields(message)} for message in chat.messages]}
        )
        rendered = await prompts.rendered(read.messages)
        ids = await generation.prompts.of_chat(rendered.pieces)
        named = request.sampling.model_dump(exclude_unset=True)
        sampling = Sampling.model_validate({"max_tokens": generation.limits.room(len(ids)), **named})
    except ValidationError as error:
        raise invalid(error) from error
    form, answers = request.form, prompts.template.answers
    if form is not None and answers is not None:
        form = answers.held(form, rendered.answer_start, generation.added_tokens)
    return replace(
        request, prompts=(ids,), sampling=sampling, ends=prompts.ends, continues_text=False, form=form
    )
