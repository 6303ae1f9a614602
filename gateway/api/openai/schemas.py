"""Request fields that completions, chats and responses share: OpenAI's and Outrider's own."""

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from gateway.api.openai.answer_types import ToldTier
from gateway.api.openai.field_types import Ignored, Label, NullIsLeftOut, Strict, Text
from gateway.api.openai.messages import Content
from gateway.api.openai.structured import ResponseFormat, StructuredOutputs, form_of
from gateway.errors import InvalidRequestError
from gateway.generation.form import Form
from gateway.generation.request import Prompt, Request
from gateway.settings import Priority, Speculation
from outrider.decoding.settings import SEED_BITS, RequestedSampling, Sampling

MAX_STOPS, MAX_STOP_LENGTH = 16, 1024  # strings, characters of a string
MAX_BIASES = 4096  # tokens
MANY_ERRORS = 100  # errors of one request; a list of more would take long
BOOLEANS = (bool, Any, Literal[False])  # types of fields that take booleans
MIN_TOP_P = 1e-9
MIN_LOGPROB = -9999.0  # JSON has no minus infinity
UNKNOWN_FIELD = "no such field is known; the setting gateway.unknown_fields=ignore would pass over it"
PRIORITIES = "'interactive', 'batch' or an integer is accepted"
ID_LISTS = ("stop_token_ids", "allowed_token_ids", "bad_token_ids")


def checked_ids(ids: Any) -> Any:
    """Returns the ids. Raises ValueError. All ids are checked in one pass, since there may be a million."""
    if not isinstance(ids, list) or not are_ids(ids):
        raise ValueError("a list of token ids is accepted")
    return ids


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


TokenIds = Annotated[list[int], PlainValidator(checked_ids, json_schema_input_type=list[int])]
Stop = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Annotated[
    list[Stop],
    BeforeValidator(_as_list, json_schema_input_type=Stop | list[Stop]),
    Field(max_length=MAX_STOPS),
]


def queue_priority(value: Any) -> Any:
    """Returns a priority: a word, or an integer as in vLLM. Raises ValueError."""
    if value in ("interactive", "batch") or (type(value) is int and -(2**63) <= value < 2**63):
        return value
    raise ValueError(PRIORITIES)


QueuePriority = Annotated[
    Priority | int, PlainValidator(queue_priority, json_schema_input_type=Priority | int)
]


class StreamOptions(Strict):
    include_usage: bool = False
    include_rounds: bool = False  # adds origins of tokens, and Draft and times of each round
    continuous_usage_stats: bool = False  # with include_usage: every event counts tokens, as in vLLM
    include_obfuscation: bool = False  # accepted, changes nothing


class Prediction(Strict):
    """Predicted text of the answer. It is used for drafting, and never changes the answer."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class GenerationRequest(RequestedSampling, NullIsLeftOut):
    """Fields of every request that generates; each sampling setting is a field."""

    top_k: int = Field(default=0, ge=0, lt=2**32)  # 32 bits on the wire
    seed: int | None = Field(default=None, ge=-(2 ** (SEED_BITS - 1)), lt=2**SEED_BITS)
    max_completion_tokens: int | None = Field(default=None, ge=1)  # overrides max_tokens, as in vLLM
    model: Text | None = None
    n: int = Field(default=1, ge=1)
    stop: Stops = Field(default_factory=list)
    include_stop_str_in_output: bool = False  # whether the text ends with the stop string that ended it
    skip_special_tokens: bool = True  # False: the text shows them, with the end of the sequence
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat = ResponseFormat()
    structured_outputs: StructuredOutputs | None = None
    speculation: Speculation = Speculation()
    task: Label | None = None
    priority: QueuePriority = 0  # an integer orders the caller's own requests, the lowest first
    service_tier: Literal["auto", "default", "flex", "priority", "scale", "fast"] | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, lt=2**32)  # newest tokens; -1: as fits
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)  # most likely tokens per position
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # whether log-probabilities name tokens by their ids
    receipt: bool = False  # whether each choice comes with a signed receipt
    prediction: Prediction | None = None
    draft_from: Label | None = None  # id of a stored answer that serves as the prediction
    store: bool = False
    # Fields of OpenAI's API that change nothing: labels and hints.
    metadata: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    user: Ignored = None

    @field_validator("*", mode="before")
    @classmethod
    def _no_number_is_a_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation not in BOOLEANS:
            raise ValueError("a boolean is not accepted")
        return value

    @field_validator("stream_options")
    @classmethod
    def _are_of_a_stream(cls, options: StreamOptions, info: ValidationInfo) -> StreamOptions:
        if options != StreamOptions() and not info.data.get("stream", True):
            raise ValueError("accepted with stream alone")
        return options

    @field_validator("top_k", mode="before")
    @classmethod
    def _all_are_kept(cls, top_k: Any) -> Any:
        """Returns transformers' 0 for vLLM's -1: both keep all tokens."""
        return 0 if top_k == -1 else top_k

    @field_validator("top_p", mode="before")
    @classmethod
    def _likeliest_is_kept(cls, top_p: Any) -> Any:
        """Returns MIN_TOP_P for 0, by which clients of OpenAI's API request the most likely token."""
        return MIN_TOP_P if top_p == 0 and not isinstance(top_p, bool) else top_p

    @field_validator(*ID_LISTS, mode="before")
    @classmethod
    def _are_ids(cls, ids: Any) -> Any:
        return checked_ids(ids) if isinstance(ids, list) else ids

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _are_few(cls, biases: Any) -> Any:
        if isinstance(biases, dict) and len(biases) > MAX_BIASES:
            raise ValueError(f"at most {MAX_BIASES} entries are accepted")
        return biases

    @property
    def asked_form(self) -> Form | None:
        """Form that the request asks for; None: any form. Raises InvalidRequestError."""
        return form_of(self.response_format, self.structured_outputs)

    @property
    def _class(self) -> Priority:
        """Requested priority: by its word, or else by the service tier."""
        if not isinstance(self.priority, int):
            return self.priority
        return "batch" if self.service_tier == "flex" else "interactive"

    def told_tier(self, priority: Priority) -> ToldTier:
        """Returns the service tier for the answer, if the request names a tier.

        priority: priority with which the request is served.
        """
        if self.service_tier is None:
            return {}
        if priority == "batch":
            return {"service_tier": "flex"}
        return {"service_tier": "priority" if self.service_tier == "priority" else "default"}

    def request(self, prompts: tuple[Prompt, ...], **sampling: Any) -> Request:
        """Returns the request. sampling: settings for which the endpoint has fields of its own."""
        if self.max_completion_tokens is not None:
            sampling["max_tokens"] = self.max_completion_tokens
        if self.seed is not None:
            sampling["seed"] = self.seed % 2**SEED_BITS
        if self.prompt_logprobs is not None:
            if self.stream or self.logprobs_of == "processed":
                raise InvalidRequestError(
                    "prompt_logprobs", "is accepted without stream and with logprobs_of 'raw'"
                )
            most = max(self.prompt_logprobs, sampling.get("logprobs", self.logprobs) or 0)
            sampling["logprobs"] = most
        asked = self.model_dump(
            include=set(RequestedSampling.model_fields) - sampling.keys(), exclude_unset=True
        )
        return Request(
            scores_prompts=self.prompt_logprobs is not None,
            prompts=prompts,
            sampling=Sampling(**asked, **sampling),
            stop=tuple(self.stop),
            keeps_stop=self.include_stop_str_in_output,
            shows_special=not self.skip_special_tokens,
            speculation=self.speculation,
            model=self.model,
            n=self.n,
            truncate_prompt=self.truncate_prompt_tokens,
            task=self.task,
            priority=self._class,
            order=self.priority if isinstance(self.priority, int) else 0,
            form=self.asked_form,
            receipt=self.receipt,
            prediction=None if self.prediction is None else self.prediction.text,
            draft_from=self.draft_from,
        )


def invalid(error: ValidationError) -> InvalidRequestError:
    """Returns the first error, with the field's path in the request, such as speculation.depth.

    The message repeats numbers but no text, which may be a prompt.
    """
    if error.error_count() > MANY_ERRORS:
        return InvalidRequestError("body", f"{error.error_count()} things in it are not as they should be")
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"])) or "body"
    value = first["input"]
    got = f", got {value!r}" if isinstance(value, bool | int | float) and len(repr(value)) < 80 else ""
    if first["type"] == "extra_forbidden":
        return InvalidRequestError(field, f"{UNKNOWN_FIELD}{got}")
    return InvalidRequestError(field, f"{first['msg']}{got}")


def are_ids(values: list[Any]) -> bool:
    """Returns whether all values are integers of at least 0, and no booleans."""
    return set(map(type, values)) <= {int} and min(values, default=0) >= 0


def finite(logprob: float) -> float:
    """Returns the log-probability as a number that JSON can hold: no infinity and no NaN."""
    return min(logprob, 0.0) if logprob > MIN_LOGPROB else MIN_LOGPROB
