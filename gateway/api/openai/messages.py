"""Messages of a chat, as callers send them and as chat templates accept them."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from gateway.api.openai.field_types import Ignored, NullIsLeftOut, Strict, Text
from gateway.api.openai.tools import MAX_CALLS, Call

MAX_MESSAGES, MAX_PARTS = 4096, 256  # messages of a chat, parts of a message


class TextPart(Strict):
    type: Literal["text"]
    text: Text
    cache_control: Ignored = None  # Anthropic's field, which some clients put into chats


def as_parts(content: Any) -> Any:
    """Returns a text as the list of its only part, and any other content unchanged."""
    return text_parts([content]) if isinstance(content, str) else content


def text_parts(texts: Iterable[str]) -> list[dict[str, Any]]:
    """Returns texts as parts of a message."""
    return [{"type": "text", "text": text} for text in texts]


def add_thoughts(message: dict[str, Any], texts: Iterable[str]) -> None:
    """Appends thoughts to the thoughts of a message, each on a line of its own."""
    earlier = [message["reasoning_content"]] if "reasoning_content" in message else []
    message["reasoning_content"] = "\n".join([*earlier, *texts])


Content = Annotated[
    list[TextPart],
    Field(max_length=MAX_PARTS, fail_fast=True),
    BeforeValidator(as_parts, json_schema_input_type=str | list[TextPart]),
]
Nothing = Annotated[list[None], Field(max_length=0)]


class Message(NullIsLeftOut):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = Field(default_factory=list, validate_default=False)
    name: Text | None = None
    tool_calls: list[Call] = Field(default_factory=list, max_length=MAX_CALLS, fail_fast=True)
    tool_call_id: Text | None = None  # call that a tool's message answers
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # vLLM's name for reasoning_content
    thinking_blocks: Ignored = None  # LiteLLM's copy of reasoning_content
    # Answers have this list, so callers send it back with the message.
    annotations: Nothing = Field(default_factory=list)

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise PydanticCustomError("missing", "content is needed")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("tool_calls", "tool_calls are an assistant's")
        return self

    def plain(self) -> dict[str, Any]:
        """Returns the message for chat templates, except that its content is the list of its parts' texts."""
        message: dict[str, Any] = {"role": self.role, "content": [part.text for part in self.content]}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        thoughts = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if thoughts is not None:
            message["reasoning_content"] = thoughts
        if self.role == "tool":
            message |= {"tool_call_id": self.tool_call_id or "", "name": self.name or ""}
        return message
