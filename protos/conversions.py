"""Converts messages to the types of outrider/ and back; no other module knows both sides."""

from typing import Any

from google.protobuf.message import Message

from outrider.decoding.draft import Draft, SparseProbs
from outrider.decoding.lease import Lease
from outrider.decoding.settings import Sampling
from outrider.drafters.known_texts import KnownTexts
from outrider.drafters.occurrences import END
from outrider.pace.step import Step, StepSize
from protos import generation_pb2, rounds_pb2


def sampling_to_message(sampling: Sampling) -> generation_pb2.Sampling:
    """Returns the message with the fields that differ from the defaults: an unset field keeps its default."""
    return generation_pb2.Sampling(**sampling.model_dump(exclude_defaults=True))


def sampling_from_message(message: generation_pb2.Sampling) -> Sampling:
    """Returns the settings. Raises pydantic.ValidationError, naming an invalid field."""
    return Sampling.model_validate(set_fields(message))


def texts_from_message(message: rounds_pb2.Open) -> KnownTexts:
    past = [token for answer in message.past for token in (*answer.ids, END)]
    return KnownTexts(tuple(message.predicted), tuple(past))


def step_to_message(step: Step) -> rounds_pb2.Step:
    size = step.size
    return rounds_pb2.Step(
        number=step.number,
        ns=int(step.seconds * 1e9),
        sequences=int(size.sequences),
        tokens=int(size.tokens),
        prompt_tokens=int(size.prompt_tokens),
        context_tokens=int(size.context_tokens),
        experts_read=step.experts_read,
        is_early=step.is_early,
    )


def step_from_message(message: rounds_pb2.Step) -> Step:
    size = StepSize(message.sequences, message.tokens, message.prompt_tokens, message.context_tokens)
    return Step(message.number, size, message.ns / 1e9, message.experts_read, message.is_early)


def set_fields(message: Message) -> dict[str, Any]:
    """Returns the fields that the sender set, as plain values."""
    return {field.name: _plain(value) for field, value in message.ListFields()}


def draft_to_message(draft: Draft) -> rounds_pb2.Draft:
    return rounds_pb2.Draft(
        tokens=draft.tokens,
        parents=draft.parents,
        draft_probs=[
            rounds_pb2.SparseProbs(token_ids=probs.token_ids, probs=probs.probs)
            for probs in draft.draft_probs
        ],
    )


def draft_from_message(message: rounds_pb2.Draft) -> Draft:
    """Returns the Draft. Raises ValueError if the tree is malformed."""
    return Draft(
        tokens=tuple(message.tokens),
        parents=tuple(message.parents),
        draft_probs=tuple(
            SparseProbs(tuple(probs.token_ids), tuple(probs.probs)) for probs in message.draft_probs
        ),
    )


def lease_to_message(lease: Lease) -> rounds_pb2.Lease:
    return rounds_pb2.Lease(**vars(lease))


def lease_from_message(message: rounds_pb2.Lease) -> Lease:
    return Lease(message.until, message.depth, message.alternatives, message.drafter, message.least_survival)


def _plain(value: Any) -> Any:
    """Returns a protobuf container as a list or dict, and other values unchanged."""
    if hasattr(value, "items"):
        return dict(value)
    return list(value) if hasattr(value, "extend") else value
