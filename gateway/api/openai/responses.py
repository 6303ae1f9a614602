"""Bodies of /v1/responses: each is translated to a chat."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from gateway.api.openai.chat import ChatRequest
from gateway.api.openai.field_types import Ignored, Label, NullIsLeftOut, Text
from gateway.api.openai.messages import MAX_MESSAGES, MAX_PARTS, add_thoughts, as_parts, text_parts
from gateway.api.openai.schemas import GenerationRequest, invalid
from gateway.api.openai.tools import MAX_TOOLS, Name
from outrider.decoding.settings import Sampling

# Names of fields at this endpoint; key: name in a chat.
NAMES = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


class InputText(NullIsLeftOut):
    type: Literal["input_text", "output_text", "reasoning_text", "text"]
    text: Text
    annotations: Ignored = None
    logprobs: Ignored = None


Parts = Annotated[
    list[InputText],
    Field(max_length=MAX_PARTS, fail_fast=True),
    BeforeValidator(as_parts, json_schema_input_type=str | list[InputText]),
]


class InputItem(NullIsLeftOut):
    """Base of items, which callers may copy from an earlier answer."""

    id: Ignored = None
    status: Ignored = None


class InputMessage(InputItem):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class FunctionCall(InputItem):
    type: Literal["function_call"]
    call_id: Text
    name: Name
    arguments: Text


class FunctionCallOutput(InputItem):
    type: Literal["function_call_output"]
    call_id: Text
    output: Parts


class Reasoning(InputItem):
    type: Literal["reasoning"]
    content: Parts = Field(default_factory=list)
    summary: Ignored = None
    encrypted_content: Ignored = None


Item = InputMessage | FunctionCall | FunctionCallOutput | Reasoning


def _as_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class FunctionTool(NullIsLeftOut):
    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False  # whether arguments must follow the schema; not every schema can be enforced

    def as_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"})}


class NamedTool(NullIsLeftOut):
    type: Literal["function"]
    name: Name


class TextFormat(NullIsLeftOut):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Label | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool = True

    def as_chat(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        schema = {"name": self.name or "answer", "schema": self.schema_, "strict": self.strict}
        return {"type": self.type, "json_schema": schema}


class TextSettings(NullIsLeftOut):
    format: TextFormat = TextFormat()
    verbosity: Ignored = None


class ReasoningSettings(NullIsLeftOut):
    effort: Label | None = None
    summary: Ignored = None
    generate_summary: Ignored = None


class ResponseRequest(GenerationRequest):
    """Request for a response: the whole conversation, or what is new since a response that is kept."""

    input: Annotated[
        list[Item],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(_as_items, json_schema_input_type=str | list[Item]),
    ]
    instructions: Text | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    n: Literal[1] = 1
    logprobs: None = None
    text: TextSettings = TextSettings()
    tools: list[FunctionTool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningSettings = ReasoningSettings()
    chat_template_kwargs: dict[Label, Any] = Field(default_factory=dict)
    background: Literal[False] = False
    store: bool = True
    previous_response_id: Text | None = None
    truncation: Literal["disabled"] = "disabled"
    include: list[Literal["reasoning.encrypted_content"]] = Field(default_factory=list, max_length=1)

    def as_chat(self, earlier: Sequence[Item] = ()) -> ChatRequest:
        """Returns the request as a chat. Raises InvalidRequestError, naming the field of the chat.

        earlier: items of the conversation before this request's input.
        """
        own = self.model_fields_set & ChatRequest.model_fields.keys() - TRANSLATED
        fields = {name: getattr(self, name) for name in own}
        fields["messages"] = _messages([*earlier, *self.input])
        if self.instructions is not None:
            fields["messages"].insert(0, {"role": "system", "content": self.instructions})
        fields["tools"] = [tool.as_chat() for tool in self.tools]
        fields["tool_choice"] = self.tool_choice
        if isinstance(self.tool_choice, NamedTool):
            fields["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        if self.text.format.type != "text":
            fields["response_format"] = self.text.format.as_chat()
        fields["max_tokens"] = self.max_output_tokens
        fields["reasoning_effort"] = self.reasoning.effort
        plain = {
            name: item.model_dump(by_alias=True, exclude_unset=True) if isinstance(item, BaseModel) else item
            for name, item in fields.items()
            if item is not None
        }
        try:
            return ChatRequest.model_validate(plain)
        except ValidationError as error:
            raise invalid(error) from error


TRANSLATED = {"tools", "tool_choice", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"}


def own_name(field: str) -> str:
    """Returns the name that a chat's field has at this endpoint."""
    first, dot, rest = field.partition(".")
    return f"{NAMES.get(first, first)}{dot}{rest}"


def _messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Returns the items as messages of a chat: adjacent items of an assistant share a message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, FunctionCallOutput):
            parts = text_parts(part.text for part in item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": parts})
        elif isinstance(item, InputMessage) and item.role != "assistant":
            parts = text_parts(part.text for part in item.content)
            messages.append({"role": item.role, "content": parts})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": []})
            _add(messages[-1], item)
    return messages


def _add(message: dict[str, Any], item: InputMessage | FunctionCall | Reasoning) -> None:
    match item:
        case InputMessage():
            message["content"] += text_parts(part.text for part in item.content)
        case FunctionCall():
            function = {"name": item.name, "arguments": item.arguments}
            message.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
        case Reasoning():
            add_thoughts(message, (part.text for part in item.content))


def repeated_fields(body: ResponseRequest, sampling: Sampling) -> Mapping[str, Any]:
    """Returns the fields of a request that its answer repeats.

    sampling: settings with the defaults of fields that the request left out.
    """
    tools = json.loads(body.model_dump_json(include={"tools", "tool_choice"}, by_alias=True))
    return {
        **tools,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "store": body.store,
        "temperature": sampling.temperature,
        "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)},
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "metadata": {},
    }
