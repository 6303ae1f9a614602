"""Typed arguments of requests, and their conversion to messages.

The names are those of protos/generation.proto. A field that is left out takes the service's default.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar

from google.protobuf.message import Message

from outrider.client.errors import BadRequestError
from protos import generation_pb2

Kind = TypeVar("Kind", bound=Message)


class MessageFields(TypedDict):
    """Message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str


class SpeculationFields(TypedDict, total=False):
    """Speculation of one request. ``report`` is True by default."""

    mode: Literal["auto", "fixed", "off"]
    depth: int
    drafter: str
    verification: Literal["coupled", "rejection", "block"]
    report: bool


class FormFields(TypedDict, total=False):
    """Form that the answer must have; exactly one field is given."""

    json_object: bool
    json: str
    regex: str
    choice: str | Sequence[str]
    grammar: str


class SamplingFields(TypedDict, total=False):
    """Sampling settings; outrider/decoding/settings.py has their meanings and limits."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    min_tokens: int
    max_tokens: int
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    allowed_token_ids: Sequence[int]
    bad_token_ids: Sequence[int]
    seed: int | None  # None: the service draws a seed
    noise_scope: Literal["prompt", "seed"]
    logprobs: int
    logprobs_of: Literal["raw", "processed"]


class GenerateFields(SamplingFields, total=False):
    """Arguments of ``generate`` and ``chat``, besides the prompt."""

    stop: str | Sequence[str]
    speculation: SpeculationFields
    structured_outputs: FormFields
    prediction: str  # expected text of the answer
    draft_from: str  # id of an answer that was stored over HTTP, in place of a prediction
    task: str
    priority: Literal["interactive", "batch"]
    model: str


def prompt_request(prompt: str | Sequence[int], fields: GenerateFields) -> generation_pb2.GenerateRequest:
    """Returns the request of a text or of token ids. Raises BadRequestError naming a wrong field."""
    if isinstance(prompt, str):
        return _request({"text": prompt}, fields)
    return _request({"tokens": _message(generation_pb2.TokenIds, {"ids": prompt})}, fields)


def chat_request(messages: Sequence[MessageFields], fields: GenerateFields) -> generation_pb2.GenerateRequest:
    """Returns the request of a chat. Raises BadRequestError naming a wrong field."""
    texts = [
        _message(generation_pb2.TextMessage, message, f"messages.{number}.")
        for number, message in enumerate(messages)
    ]
    return _request({"chat": generation_pb2.TextMessages(messages=texts)}, fields)


def _request(prompt: Mapping[str, Any], fields: GenerateFields) -> generation_pb2.GenerateRequest:
    if unknown := fields.keys() - GenerateFields.__annotations__.keys():
        name, known = min(unknown), ", ".join(GenerateFields.__annotations__)
        raise BadRequestError(f"{name}: there is no such argument: {known} are known", name)
    sampling = {name: fields[name] for name in SamplingFields.__annotations__ if name in fields}  # type: ignore[literal-required]
    speculation = {"report": True, **fields.get("speculation", {})}
    request = {
        "sampling": _message(generation_pb2.Sampling, sampling),
        "speculation": _message(generation_pb2.SpeculationSettings, speculation, "speculation."),
        "stop": _texts(fields.get("stop", ())),
        "predicted_text": fields.get("prediction"),
        "draft_from": fields.get("draft_from"),
        "task": fields.get("task"),
        "priority": fields.get("priority"),
        "model": fields.get("model"),
    }
    if "structured_outputs" in fields:
        form = dict(fields["structured_outputs"])
        if "choice" in form:
            form["choice"] = generation_pb2.Texts(texts=_texts(form["choice"]))
        request["structured_outputs"] = _message(
            generation_pb2.StructuredOutputs, form, "structured_outputs."
        )
    return _message(generation_pb2.GenerateRequest, {**prompt, **request})


def _texts(given: Any) -> Any:
    """Returns a list of texts; a bare string would be taken for a list of its letters."""
    return [given] if isinstance(given, str) else given


def _message(kind: type[Kind], fields: Mapping[str, Any], within: str = "") -> Kind:
    """Returns the message; fields that are None are left out.

    within: prefix of a field's name in an error.

    Raises:
        BadRequestError: the message has no such field, or the value has a wrong type.
    """
    message = kind()
    for name, value in fields.items():
        try:
            message.MergeFrom(kind(**{name: value}))
        except (TypeError, ValueError) as error:
            named = f"{within}{name}"
            raise BadRequestError(f"{named}: {value!r} is not accepted: {error}", named) from None
    return message
