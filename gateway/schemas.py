"""OpenAI's request and response bodies, as far as they are served, with our fields beside them."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from decoding.settings import Sampling, TokenId
from gateway.generation import Chunk, Request, Usage
from gateway.settings import Speculation

MAX_STOPS = 16


class StreamOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False  # accepted, never done


class CompletionRequest(Sampling):
    """Every sampling setting is a field of the request. OpenAI's null means "left out"."""

    model: str | None = None
    prompt: str | Annotated[list[TokenId], Field(min_length=1)]
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    speculation: Speculation = Speculation()
    user: str | None = None  # accepted, not used
    # Fields of OpenAI's that have one accepted value so far.
    n: Literal[1] = 1
    best_of: Literal[1] = 1
    echo: Literal[False] = False
    suffix: None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, fields: Any) -> Any:
        if isinstance(fields, dict):
            return {name: value for name, value in fields.items() if value is not None}
        return fields

    def request(self) -> Request:
        return Request(
            prompt=self.prompt if isinstance(self.prompt, str) else tuple(self.prompt),
            sampling=Sampling(**self.model_dump(include=set(Sampling.model_fields), exclude_defaults=True)),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            speculation=self.speculation,
            model=self.model,
        )


class Completion:
    """The bodies of one answer; ``id``, time and model are the same in all of them."""

    def __init__(self, model: str, seed: int) -> None:
        self._frame = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._seed = seed

    def body(self, chunk: Chunk) -> dict[str, Any]:
        """One choice, finished or not."""
        choice = {"index": 0, "text": chunk.text, "logprobs": None, "finish_reason": chunk.finish_reason}
        return {**self._frame, "choices": [choice]}

    def whole(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        last = chunks[-1]
        assert last.usage is not None
        text = "".join(chunk.text for chunk in chunks)
        return {**self.body(replace(last, text=text)), "usage": self.usage(last.usage)}

    def usage(self, usage: Usage) -> dict[str, Any]:
        record = usage.record
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": record.accepted,
                "rejected_prediction_tokens": record.drafted - record.accepted,
            },
            "speculation": {**usage.speculation.model_dump(), **asdict(record), "seed": self._seed},
        }

    def usage_body(self, usage: Usage) -> dict[str, Any]:
        """The extra last chunk of a stream that asked for it: no choice, only usage."""
        return {**self._frame, "choices": [], "usage": self.usage(usage)}


def error_body(
    message: str, *, type_: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def first_error(errors: Sequence[Any]) -> tuple[str, str]:
    """Field and message of pydantic's first error, the field as the client wrote it: speculation.depth."""
    first = errors[0]
    field = ".".join(str(name) for name in first["loc"] if name != "body") or "body"
    return field, f"{first['msg']}, got {_shortened(first['input'])}"


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
