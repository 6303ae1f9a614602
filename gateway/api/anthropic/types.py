"""Types of responses to /v1/messages, as /openapi.json describes them."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from gateway.api.openai.answer_types import SpeculationCounts, SpeculationReport

StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
MessageTier = Literal["standard", "batch"]
ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
    "timeout_error",
]


class TextContent(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingContent(TypedDict):
    type: Literal["thinking"]
    thinking: Annotated[str, Field(description="empty if the request leaves thoughts out")]
    signature: Annotated[str, Field(description="always the same text; nothing is verified")]


class ToolUseContent(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Content = Annotated[TextContent | ThinkingContent | ToolUseContent, Field(discriminator="type")]


class ThinkingTokens(TypedDict):
    thinking_tokens: Annotated[int, Field(description="tokens of thoughts and of their marks")]


class MessageUsage(TypedDict):
    input_tokens: Annotated[int, Field(description="tokens of the prompt that were not cached before")]
    cache_creation_input_tokens: Annotated[int, Field(description="always 0: input_tokens has them")]
    cache_read_input_tokens: Annotated[int, Field(description="tokens of the prompt that were cached before")]
    output_tokens: int
    output_tokens_details: ThinkingTokens
    service_tier: NotRequired[
        Annotated[MessageTier, Field(description="tier in which the request was served, if it names one")]
    ]
    speculation: NotRequired[SpeculationReport | SpeculationCounts]


class AnsweredMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class CountedTokens(TypedDict):
    input_tokens: int


class MessageStart(TypedDict):
    type: Literal["message_start"]
    message: AnsweredMessage


class BlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: Content


class TextBlockDelta(TypedDict):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(TypedDict):
    type: Literal["signature_delta"]
    signature: str


class InputDelta(TypedDict):
    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[
        TextBlockDelta | ThinkingDelta | SignatureDelta | InputDelta, Field(discriminator="type")
    ]


class BlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: int


class Stopped(TypedDict):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(TypedDict):
    type: Literal["message_delta"]
    delta: Stopped
    usage: MessageUsage


class MessageStop(TypedDict):
    type: Literal["message_stop"]


class Ping(TypedDict):
    type: Literal["ping"]


class MessageErrorDetails(TypedDict):
    type: ErrorType
    message: str


class MessageError(TypedDict):
    type: Literal["error"]
    error: MessageErrorDetails


MessageEvent = Annotated[
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping | MessageError,
    Field(discriminator="type"),
]
