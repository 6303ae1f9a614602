"""What the endpoints of the OpenAI API have in common, and our fields beside theirs."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from decoding.settings import RequestedSampling, Sampling
from gateway.errors import InvalidRequestError
from gateway.generation import Request, Usage
from gateway.settings import Priority, Speculation

MAX_STOPS = 16
LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


def checked_text(value: str) -> str:
    """JSON can spell half of a surrogate pair, which no tokenizer takes. Raises ValueError."""
    value.encode()
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Text = Annotated[str, AfterValidator(checked_text)]
Stop = Annotated[Text, Field(min_length=1)]
Stops = Annotated[list[Stop], BeforeValidator(_as_list), Field(max_length=MAX_STOPS)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    include_usage: bool = False
    include_rounds: bool = False  # origin of each token, and of each round its Draft and its times
    include_obfuscation: bool = False  # accepted, never done


class NullIsLeftOut(BaseModel):
    """As in OpenAI's API."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if isinstance(fields, dict):
            return {name: value for name, value in fields.items() if value is not None}
        return fields


class GenerationRequest(RequestedSampling, NullIsLeftOut):
    """Every sampling setting is a field of the request."""

    top_k: int = Field(default=0, ge=0, lt=2**32)  # as many bits as it travels in
    model: Text | None = None
    n: int = Field(default=1, ge=1)
    stop: Stops = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    speculation: Speculation = Speculation()
    task: str | None = Field(default=None, max_length=64)
    priority: Priority = "interactive"
    user: Text | None = None  # accepted, not used

    def request(self, prompt: str | tuple[int, ...], **sampling: Any) -> Request:
        """``sampling`` holds what the endpoint says in its own words."""
        asked = self.model_dump(
            include=set(RequestedSampling.model_fields) - sampling.keys(), exclude_unset=True
        )
        return Request(
            prompt=prompt,
            sampling=Sampling(**asked, **sampling),
            stop=tuple(self.stop),
            speculation=self.speculation,
            model=self.model,
            n=self.n,
            task=self.task,
            priority=self.priority,
        )


def usage_body(usage: Usage, seed: int) -> dict[str, Any]:
    record = usage.record
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": record.accepted,
            "rejected_prediction_tokens": record.drafted - record.accepted,
        },
        "speculation": {
            **usage.speculation.model_dump(),
            "rounds": record.rounds,
            "drafted": record.drafted,
            "verified": record.verified,
            "accepted": record.accepted,
            "mean_accepted_length": round(record.mean_accepted_length, 3),
            "accepted_lengths": record.histogram,
            "target_passes": record.target_passes,
            "fallbacks": record.fallbacks,
            "late_drafts": record.late_drafts,
            "lost_drafts": record.lost_drafts,
            "empty_drafts": record.empty_drafts,
            "lost_targets": record.lost_targets,
            "prepared_for": record.prepared_for,
            "foreseen_ranks": record.foreseen_ranks,
            "gone_on": record.gone_on,
            "saved_ms": round(1e3 * record.saved_s, 3),
            "discarded": record.discarded,
            "seed": seed,
        },
    }


def error_body(
    message: str, *, type_: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def invalid(error: ValidationError) -> InvalidRequestError:
    """The first thing that is wrong, by the request's own name for it."""
    return InvalidRequestError(*first_error(error.errors()))


def first_error(errors: Sequence[Any]) -> tuple[str, str]:
    """Field and message of pydantic's first error, the field as the client wrote it: speculation.depth.

    Text is not repeated: it may be a prompt.
    """
    first = errors[0]
    field = ".".join(str(name) for name in first["loc"] if name != "body") or "body"
    value = first["input"]
    got = f", got {value!r}" if isinstance(value, bool | int | float) and len(repr(value)) < 80 else ""
    return field, f"{first['msg']}{got}"


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
