"""The schemas decide what is fuzzed: every field, also fields that are added later."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import hypothesis
import pytest
from google.protobuf.descriptor import Descriptor
from hypothesis.strategies import SearchStrategy
from pydantic import BaseModel

from gateway.api.openai.chat import ChatRequest
from gateway.api.openai.completions import CompletionRequest
from gateway.api.openai.responses import ResponseRequest
from gateway.api.text_api import DetokenizeRequest, TokenizeRequest
from protos import generation_pb2, rounds_pb2
from tests.fuzz.bodies import body_of
from tests.fuzz.messages import descriptor_of, message_of
from tests.fuzz.sessions import sessions
from tests.fuzz.values import graded

Path = tuple[str, ...]

EXAMPLES, SEEDS = 60, 60  # examples of each seed, seeds


def fields_of(model: type[BaseModel]) -> set[Path]:
    """Every field of a model, and of the models inside it."""
    found: set[Path] = set()
    for name, field in model.model_fields.items():
        inside = [inner for part in _parts(field.annotation) for inner in fields_of(part)]
        said = field.alias or name
        found |= {(said,), *((said, *path) for path in inside)}
    return found


def _parts(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _parts(argument)


def fields_in(descriptor: Descriptor) -> set[Path]:
    """Every field of a message, and of the messages inside it."""
    found: set[Path] = set()
    for field in descriptor.fields:
        message = field.message_type
        is_map = message is not None and message.GetOptions().map_entry
        inside = fields_in(message) if message is not None and not is_map else ()
        found |= {(field.name,), *((field.name, *path) for path in inside)}
    return found


def said_in(value: Any) -> set[Path]:
    """Every path of keys through dictionaries, lists left out."""
    if isinstance(value, list):
        return {path for item in value for path in said_in(item)}
    if not isinstance(value, Mapping):
        return set()
    return {
        path
        for key, item in value.items()
        for path in ((str(key),), *((str(key), *inner) for inner in said_in(item)))
    }


def never_said(
    expected: set[Any], strategy: SearchStrategy[Any], read: Callable[[Any], set[Any]] = said_in
) -> set[Any]:
    """What of the expected is in no example; it stops as soon as that is nothing."""
    missing = set(expected)

    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=False,  # the seeds are given
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def listen(value: Any) -> None:
        missing.difference_update(read(value))

    for number in range(SEEDS):
        hypothesis.seed(number)(listen)()
        if not missing:
            break
    return missing


@pytest.mark.parametrize(
    "model",
    [
        CompletionRequest,
        pytest.param(ChatRequest, marks=pytest.mark.slow),
        pytest.param(ResponseRequest, marks=pytest.mark.slow),
        TokenizeRequest,
        DetokenizeRequest,
    ],
)
def test_bodies_have_every_field_of_the_request(model: type[BaseModel]) -> None:
    assert never_said(fields_of(model), graded(body_of(model))) == set()


def test_body_with_an_added_field_says_it() -> None:
    class Added(CompletionRequest):
        unheard_of: int = 0

    assert never_said({("unheard_of",)}, body_of(Added).extreme) == set()


@pytest.mark.slow
def test_messages_have_every_field_of_the_request() -> None:
    descriptor = descriptor_of(generation_pb2.GenerateRequest)
    assert never_said(fields_in(descriptor), graded(message_of(descriptor))) == set()


@pytest.mark.slow
def test_streams_to_workers_have_every_field_of_their_messages() -> None:
    expected = {
        (role, *path)
        for role, request in (
            ("target", rounds_pb2.TargetWorkerRequest),
            ("draft", rounds_pb2.DraftWorkerRequest),
        )
        for path in fields_in(descriptor_of(request))
    }
    never = never_said(
        expected,
        sessions(),
        lambda session: {(session.role, *path) for path in said_in(list(session.messages))},
    )
    assert never == set()
