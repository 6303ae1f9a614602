"""Bodies of /v1/messages and /v1/messages/count_tokens: each is translated to a chat.

Sources: the types of Anthropic's Python package, and requests that Claude Code sends to other services.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from gateway.api.anthropic.types import MessageTier
from gateway.api.openai.chat import THINKS, ChatRequest
from gateway.api.openai.field_types import Ignored, Label, NullIsLeftOut, Text
from gateway.api.openai.messages import MAX_MESSAGES, MAX_PARTS, add_thoughts, as_parts, text_parts
from gateway.api.openai.rendering import CONTINUES, KWARGS
from gateway.api.openai.schemas import MAX_STOPS, QueuePriority, Stop, invalid
from gateway.api.openai.structured import JsonSchema
from gateway.api.openai.tools import MAX_TOOLS, Name
from gateway.errors import InvalidRequestError
from gateway.settings import Priority, Speculation
from outrider.decoding.settings import SEED_BITS

# Claude Code sends billing information in this line. It is no instruction, and would differ by conversation.
BILLING = "x-anthropic-billing-header"
FAILED = "Error: "  # prefix of a failed tool's result: chat templates have no field for failures
# Names of fields in this API; key: name in a chat.
NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    CONTINUES: "messages",
    KWARGS: "thinking",
    "parallel_tool_calls": "tool_choice",
}


class Hinted(NullIsLeftOut):
    """Base of blocks and tools, which may have hints about caching; here every prefix is cached."""

    cache_control: Ignored = None


class TextBlock(Hinted):
    type: Literal["text"]
    text: Text
    citations: Ignored = None


class ThinkingBlock(Hinted):
    type: Literal["thinking"]
    thinking: Text
    signature: Ignored = None


class RedactedThinking(Hinted):
    """Thoughts that another service has encrypted; they are left out."""

    type: Literal["redacted_thinking"]
    data: Ignored = None


class ToolUse(Hinted):
    type: Literal["tool_use"]
    id: Text
    name: Name
    input: dict[str, Any]
    caller: Ignored = None


Texts = Annotated[
    list[TextBlock],
    Field(max_length=MAX_PARTS, fail_fast=True),
    BeforeValidator(as_parts, json_schema_input_type=str | list[TextBlock]),
]


class ToolResult(Hinted):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Texts = Field(default_factory=list)
    is_error: bool = False


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinking | ToolUse | ToolResult, Field(discriminator="type")
]


class GivenMessage(NullIsLeftOut):
    role: Label  # "assistant", "system", or whatever name a user has
    content: Annotated[
        list[Block],
        Field(max_length=MAX_PARTS, fail_fast=True),
        BeforeValidator(as_parts, json_schema_input_type=str | list[Block]),
    ]


class GivenTool(Hinted):
    type: Literal["custom"] = "custom"
    name: Name
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool = False
    allowed_callers: Ignored = None
    defer_loading: Ignored = None
    eager_input_streaming: Ignored = None
    input_examples: Ignored = None

    def as_chat(self) -> dict[str, Any]:
        own = {"name": self.name, "description": self.description, "strict": self.strict}
        return {"type": "function", "function": {**own, "parameters": self.input_schema}}


class ToolChoice(NullIsLeftOut):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_a_tool(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name belongs to the type 'tool', which needs it")
        return self

    def as_chat(self) -> Any:
        if self.name is not None:
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class ThinkingSettings(NullIsLeftOut):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Ignored = None
    display: Literal["summarized", "omitted"] = "summarized"


class OutputFormat(NullIsLeftOut):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputSettings(NullIsLeftOut):
    effort: Label | None = None
    format: OutputFormat | None = None
    task_budget: Ignored = None


class CountRequest(Hinted):
    """Request for the number of tokens that a conversation has; no token is generated."""

    model: Text
    messages: list[GivenMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    system: Texts = Field(default_factory=list)
    tools: list[GivenTool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: ThinkingSettings = ThinkingSettings(type="disabled")
    output_config: OutputSettings = OutputSettings()
    # Fields of Anthropic's API that change nothing: labels and hints.
    betas: Ignored = None
    container: Ignored = None
    context_management: Ignored = None
    inference_geo: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None

    def as_chat(self, variables: Collection[str]) -> ChatRequest:
        """Returns the request as a chat.

        variables: variables that the chat template reads.

        Raises:
            InvalidRequestError: the request is invalid; the error names the field of the chat.
        """
        try:
            return ChatRequest.model_validate(self._fields(variables))
        except ValidationError as error:
            raise invalid(error) from error

    def _fields(self, variables: Collection[str]) -> dict[str, Any]:
        """Returns the fields of the chat."""
        messages = _messages(self.system, self.messages)
        if not messages:
            raise InvalidRequestError("messages", "hold no text")
        thinks = self.thinking.type != "disabled"
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "continue_final_message": messages[-1]["role"] == "assistant",
            "tools": [tool.as_chat() for tool in self.tools],
            "tool_choice": self.tool_choice.as_chat(),
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            KWARGS: {name: thinks for name in THINKS if name in variables},
        }
        if self.output_config.effort is not None:
            fields["reasoning_effort"] = self.output_config.effort
        if (form := self.output_config.format) is not None:
            schema = JsonSchema(name="answer", schema=form.schema_).model_dump(by_alias=True)
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields


class MessagesRequest(CountRequest):
    """Request for the next message of a conversation. The fields after ``top_k`` are Outrider's own."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[Stop] = Field(default_factory=list, max_length=MAX_STOPS)
    stream: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(default=0, ge=0, lt=2**32)
    seed: int | None = Field(default=None, ge=-(2 ** (SEED_BITS - 1)), lt=2**SEED_BITS)
    speculation: Speculation = Speculation()
    task: Label | None = None
    priority: QueuePriority = 0
    service_tier: Literal["auto", "standard_only"] | None = None

    def told_tier(self, priority: Priority) -> MessageTier | None:
        """Returns the service tier for the answer; None: the request names no tier.

        priority: priority with which the request is served.
        """
        if self.service_tier is None:
            return None
        return "batch" if priority == "batch" else "standard"

    def _fields(self, variables: Collection[str]) -> dict[str, Any]:
        passed = ("temperature", "top_p", "top_k", "seed", "speculation", "task", "priority")
        own = self.model_dump(include={*passed} & self.model_fields_set, exclude_unset=True)
        limits = {"max_tokens": self.max_tokens, "stop": self.stop_sequences}
        return {**super()._fields(variables), **limits, **own}


def own_name(field: str) -> str:
    """Returns the name that a chat's field has in this API. Positions of messages differ, so they are cut."""
    first, dot, rest = field.partition(".")
    if first in ("messages", "prompt"):
        return "messages"
    return NAMES.get(first, f"{first}{dot}{rest}")


def _messages(system: Iterable[TextBlock], given: Sequence[GivenMessage]) -> list[dict[str, Any]]:
    """Returns the messages of the chat.

    All instructions are merged into one message at the beginning, since most templates accept no other.
    Adjacent messages of one role are merged too. Results of tools are separate messages.
    """
    said = [block for message in given if message.role == "system" for block in message.content]
    instructions = [
        block
        for block in [*system, *said]
        if isinstance(block, TextBlock) and not block.text.startswith(BILLING)
    ]
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": text_parts(block.text for block in instructions)})
    names: dict[str, str] = {}  # names of tools; key: id of the call
    for message in given:
        if message.role == "system":
            continue
        role = "assistant" if message.role == "assistant" else "user"
        for block in message.content:
            if isinstance(block, ToolUse):
                names[block.id] = block.name
            _add(messages, role, block, names)
        if not message.content:
            _last(messages, role)
    return messages


def _add(messages: list[dict[str, Any]], role: str, block: Block, names: dict[str, str]) -> None:
    """Adds a block of a message to the chat."""
    match block:
        case TextBlock():
            _last(messages, role)["content"] += text_parts([block.text])
        case ToolResult():
            content = text_parts(part.text for part in block.content)
            if block.is_error:
                first, *others = content or [{"type": "text", "text": ""}]
                content = [{**first, "text": FAILED + first["text"]}, *others]
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
            messages.append({**result, "name": names.get(block.tool_use_id, "")})
        case ThinkingBlock():
            add_thoughts(_last(messages, role), [block.thinking])
        case ToolUse():
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            call = {"id": block.id, "function": function}
            _last(messages, role).setdefault("tool_calls", []).append(call)


def _last(messages: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """Returns the last message if it has this role, else a new message."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": []})
    return messages[-1]
