"""Types of responses to /v1/responses, as /openapi.json describes them."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from gateway.api.openai.answer_types import (
    CachedTokens,
    Metrics,
    ReasoningTokens,
    SpeculationCounts,
    SpeculationReport,
    ToldReceipt,
    ToldTier,
)

Status = Literal["in_progress", "completed", "incomplete"]
Nothing = Annotated[list[Any], Field(max_length=0)]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: Nothing
    logprobs: Nothing


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputItem(TypedDict):
    id: str
    status: Status


class OutputMessage(OutputItem):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(OutputItem):
    type: Literal["reasoning"]
    summary: Nothing
    content: list[ReasoningText]


class OutputFunctionCall(OutputItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Annotated[str, Field(description="the text of a JSON object")]


Output = Annotated[OutputMessage | OutputReasoning | OutputFunctionCall, Field(discriminator="type")]


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int
    speculation: SpeculationReport | SpeculationCounts


class ResponseError(TypedDict):
    code: Literal["invalid_prompt", "server_error"]
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class Seed(TypedDict):
    seed: Annotated[int, Field(description="seed that gives this text again")]


class RepeatedReasoning(TypedDict):
    effort: str | None
    summary: None


class RepeatedText(TypedDict):
    format: Annotated[dict[str, Any], Field(description="as the request has it")]


class RepeatedTool(TypedDict):
    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any]
    strict: bool


class RepeatedChoice(TypedDict):
    type: Literal["function"]
    name: str


class Repeated(ToldTier):
    """Fields of the request that the answer repeats."""

    instructions: str | None
    max_output_tokens: int | None
    metadata: Annotated[dict[str, str], Field(max_length=0)]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: RepeatedReasoning
    store: Annotated[bool, Field(description="whether the response is kept")]
    temperature: float
    text: RepeatedText
    tool_choice: Literal["none", "auto", "required"] | RepeatedChoice
    tools: list[RepeatedTool]
    top_p: float
    truncation: Literal["disabled"]


class Response(Repeated):
    id: str
    object: Literal["response"]
    created_at: Annotated[int, Field(description="seconds since 1970")]
    status: Status | Literal["failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[Output]
    usage: ResponseUsage | None
    metrics: NotRequired[Metrics]
    receipt: NotRequired[ToldReceipt]
    outrider: Seed


class Event(TypedDict):
    sequence_number: int


class OfResponse(Event):
    """Event with the whole response; it begins and ends a stream."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: Response


class OfItem(Event):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: Output


class Placed(Event):
    item_id: str
    output_index: int


class OfPart(Placed):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: Annotated[OutputText | ReasoningText, Field(discriminator="type")]


class TextDelta(Placed):
    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: Nothing


class TextDone(Placed):
    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: Nothing


class ReasoningDelta(Placed):
    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ReasoningDone(Placed):
    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class ArgumentsDelta(Placed):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(Placed):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


ResponseEvent = Annotated[
    OfResponse
    | OfItem
    | OfPart
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone,
    Field(discriminator="type"),
]


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseItems(TypedDict):
    object: Literal["list"]
    data: Annotated[list[dict[str, Any]], Field(description="items as the request had them")]
    has_more: Literal[False]
