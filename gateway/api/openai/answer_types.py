"""Types of responses to completions and chats, as /openapi.json describes them."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, WithJsonSchema, create_model
from typing_extensions import TypedDict

from gateway.api.message_json import json_schema_of
from outrider.decoding.settings import Verification
from outrider.telemetry.counters import IN_EVERY_ANSWER, IN_REPORTS, SpeculationCounter
from protos import generation_pb2

EndReason = Annotated[str | None, WithJsonSchema({"enum": ["stop", "length", None]})]
FinishReason = Annotated[str | None, WithJsonSchema({"enum": ["stop", "length", "tool_calls", None]})]
ErrorType = Literal["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]
ErrorCode = Literal["invalid_api_key", "model_not_found", "context_length_exceeded"]


class TokenCounts(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CachedTokens(TypedDict):
    cached_tokens: Annotated[
        int, Field(description="tokens of the prompts that the target had cached before the request")
    ]


class ReasoningTokens(TypedDict):
    reasoning_tokens: Annotated[int, Field(description="tokens of thoughts and of their marks")]


class CompletionDetails(ReasoningTokens):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


def _speculation_schema(name: str, counters: Iterable[SpeculationCounter], **more: Any) -> WithJsonSchema:
    """Returns the schema of ``usage.speculation`` with these counters. more: types of other fields."""
    counted: dict[str, Any] = {
        counter.name: (counter.type, Field(description=counter.meaning)) for counter in counters
    }
    seed = (int, Field(description="seed that gives this text again"))
    return WithJsonSchema(create_model(name, **counted, **more, seed=seed).model_json_schema())


# Counters that every answer has.
SpeculationCounts = Annotated[dict[str, Any], _speculation_schema("SpeculationCounts", IN_EVERY_ANSWER)]
# Counters of an answer if the request has ``"speculation": {"report": true}``.
SpeculationReport = Annotated[
    dict[str, Any],
    _speculation_schema(
        "SpeculationReport",
        (*IN_EVERY_ANSWER, *IN_REPORTS),
        mode=Literal["auto", "fixed", "off"],
        depth=int | None,
        drafter=str | None,
        verification=Verification,
    ),
]


class Usage(TokenCounts):
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails
    speculation: SpeculationReport | SpeculationCounts


class SpeculativeDecoding(TypedDict):
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: Annotated[
        list[int], Field(description="rounds that accepted 0, 1, ... num_spec_tokens tokens")
    ]
    num_spec_tokens: Annotated[int, Field(description="most tokens that a Draft may have")]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int


class Metrics(TypedDict):
    speculative_decoding: SpeculativeDecoding


class FinalUsage(TypedDict):
    """Fields that end an answer."""

    usage: Usage
    metrics: NotRequired[Annotated[Metrics, Field(description="in a report on one choice")]]


class ErrorDetails(TypedDict):
    message: str
    type: ErrorType
    param: Annotated[str | None, Field(description="the field that is wrong")]
    code: ErrorCode | None


class Error(TypedDict):
    error: ErrorDetails


class ShownToken(TypedDict):
    text: str
    origin: Literal["accepted", "forced", "target", "plain"]


Round = Annotated[
    dict[str, Any],
    WithJsonSchema(json_schema_of(generation_pb2.Round.DESCRIPTOR, drafted={"type": "string"})),
]


class EventDetails(TypedDict, total=False):
    """Outrider's own fields of an event: the seed in the first event, the rest with include_rounds."""

    seed: int
    choice: int
    tokens: list[ShownToken]
    round: Round


class ToldTier(TypedDict, total=False):
    """Field of an answer to a request that names a tier."""

    service_tier: Annotated[
        Literal["default", "flex", "priority"], Field(description="tier in which the request was served")
    ]


class Frame(ToldTier):
    """Fields that all bodies of one answer have in common."""

    id: str
    created: Annotated[int, Field(description="seconds since 1970")]
    model: str
    system_fingerprint: Annotated[
        str, Field(description="with another fingerprint, the same seed may give another text")
    ]


class EventExtras(TypedDict):
    """Fields that only some events of a stream have."""

    outrider: NotRequired[EventDetails]
    usage: NotRequired[Usage | TokenCounts | None]  # None: only the last event has it, as in OpenAI's API
    metrics: NotRequired[Metrics]


class CompletionLogprobs(TypedDict):
    """Lists of one entry per token; the first token of a prompt has no probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: Annotated[list[int], Field(description="characters from the beginning of the text")]


class PromptLogprob(TypedDict):
    """Log-probability of one token at one place of a prompt."""

    logprob: float
    rank: Annotated[int | None, Field(description="place among the likeliest tokens; null: further behind")]
    decoded_token: str


# An item for each position of the prompt: entries by token id, the prompt's own token first; null for the
# first position.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


ToldReceipt = Annotated[
    dict[str, Any], Field(description="with receipt, at the end: all that decides the tokens, signed")
]


class EndedChoice(TypedDict):
    """Fields of every choice that vLLM adds to OpenAI's."""

    stop_reason: Annotated[
        str | int | None, Field(description="stop string or stop token that ended the text, if one did")
    ]
    token_ids: NotRequired[Annotated[list[int], Field(description="with return_token_ids")]]
    receipt: NotRequired[ToldReceipt]


class CompletionChoice(EndedChoice):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: EndReason
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class Completion(Frame, FinalUsage):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionEvent(Frame, EventExtras):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CalledFunction(TypedDict):
    name: str
    arguments: Annotated[str, Field(description="the text of a JSON object")]


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    refusal: None
    content: str | None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[Annotated[str, Field(description="reasoning_content under vLLM's newer name")]]
    tool_calls: NotRequired[list[ToolCall]]


class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    content: list[ContentLogprob]
    refusal: None


class ChatChoice(EndedChoice):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class PromptDetails(TypedDict):
    """Fields of a chat's answer about the prompt."""

    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class ChatCompletion(Frame, FinalUsage, PromptDetails):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class FunctionDelta(TypedDict, total=False):
    name: str
    arguments: str


class ToolCallDelta(TypedDict):
    """Part of a call: the first part has its name, further parts continue its arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    reasoning_content: str
    reasoning: Annotated[str, Field(description="reasoning_content under vLLM's newer name")]
    tool_calls: list[ToolCallDelta]


class ChatEventChoice(EndedChoice):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatEvent(Frame, EventExtras, PromptDetails):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatEventChoice]
