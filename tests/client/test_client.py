"""Client finishes its answer though gateways are lost on the way, and yields no token twice."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from outrider.client import answer as answers
from outrider.client.client import Client
from outrider.client.errors import (
    AuthenticationError,
    BadRequestError,
    DeadlineExceededError,
    OutriderError,
    ServiceOverloadedError,
    ServiceUnavailableError,
)
from outrider.learning.backoff import Backoff
from tests.fakes.text_gateway import SEED, TEXT, TOKENS, TextGateway, serving


@pytest.fixture
def gateway(monkeypatch) -> Iterator[tuple[TextGateway, str]]:
    monkeypatch.setattr(answers, "PAUSE", Backoff(0.001, 3.0))
    with serving(TextGateway()) as served:
        yield served


@pytest.mark.parametrize("first", range(7))
@pytest.mark.parametrize("second", [0, 2])
def test_answer_that_broke_is_finished_with_the_same_text(gateway, first, second):
    script, address = gateway
    script.breaks = [first, second]
    with Client(address) as client:
        answer = client.generate("x")
        pieces = list(answer)
    assert "".join(piece.text for piece in pieces) == TEXT
    assert [piece.token_id for piece in pieces] == TOKENS
    assert (answer.repeats, answer.finish_reason, answer.seed) == (2, "length", SEED)
    assert script.seeds[0] is None
    assert script.seeds[1] == (None if first == 0 else SEED)


@pytest.mark.parametrize("page", ["README.md", "docs/clients.md"])
def test_example_of_a_page_prints_the_answer(gateway, capsys, page):
    _, address = gateway
    text = (Path(__file__).parents[2] / page).read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.S)
    (example,) = (example for example in examples if "import Client" in example)
    exec(example.replace("127.0.0.1:9000", address), {})
    assert capsys.readouterr().out.startswith(TEXT)


def test_answer_of_a_wrong_request_is_not_tried_again(gateway):
    script, address = gateway
    script.breaks, script.code = [0], grpc.StatusCode.INVALID_ARGUMENT
    with Client(address) as client, pytest.raises(BadRequestError, match="gone"):
        list(client.generate("x"))
    assert len(script.seeds) == 1


@pytest.mark.parametrize(
    ("details", "is_repeated"),
    [
        ("The actor died unexpectedly before finishing this task.", True),
        ("The actor 94f1 is unavailable: Actor is unavailable.. The task may have been executed.", True),
        ("The actor 0a is unavailable: The actor is temporarily unavailable: Socket closed", True),
        ("KeyError: a defect", False),
    ],
)
def test_answer_after_internal_is_tried_again_only_for_a_lost_gateway(gateway, details, is_repeated):
    script, address = gateway
    script.breaks, script.code, script.details = [2], grpc.StatusCode.INTERNAL, details
    with Client(address) as client:
        answer = client.generate("x")
        if is_repeated:
            assert [piece.token_id for piece in answer] == TOKENS
        else:
            with pytest.raises(OutriderError, match="defect"):
                list(answer)
    assert answer.repeats == is_repeated


def test_answer_without_tokens_raises_after_the_patience(gateway):
    script, address = gateway
    script.breaks = [0] * 10_000
    with Client(address, patience_s=0.05) as client, pytest.raises(ServiceUnavailableError, match="gone"):
        list(client.generate("x"))


def test_answer_that_is_not_read_to_its_end_is_cancelled(gateway):
    _, address = gateway
    before = threading.active_count()
    with Client(address) as client:
        pieces = iter(client.generate("x"))
        assert next(pieces).text == "The "
        pieces.close()
    assert threading.active_count() <= before + 2


def test_answer_iterated_twice_yields_its_pieces_again_and_asks_once(gateway):
    script, address = gateway
    with Client(address) as client:
        answer = client.generate("x")
        assert list(answer) == list(answer) == answer.pieces
    assert answer.text == TEXT
    assert len(script.seeds) == 1


def test_answer_iterated_twice_at_once_yields_its_pieces_to_both(gateway):
    _, address = gateway
    with Client(address) as client:
        answer = client.generate("x")
        pairs = list(zip(answer, answer, strict=True))
    assert [(one.token_id, other.token_id) for one, other in pairs] == [(token, token) for token in TOKENS]


@pytest.mark.parametrize("read", range(8))
def test_answer_that_was_left_early_goes_on_with_its_seed(gateway, read):
    script, address = gateway
    with Client(address) as client:
        answer = client.generate("x")
        for number, _ in enumerate(answer, 1):
            if number >= read:
                break
        assert answer.read() == TEXT
        assert [piece.token_id for piece in answer] == TOKENS
    assert script.seeds in ([None], [None, SEED])


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, AuthenticationError),
        (grpc.StatusCode.PERMISSION_DENIED, AuthenticationError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceededError),
        (grpc.StatusCode.UNAVAILABLE, ServiceUnavailableError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ServiceOverloadedError),
        (grpc.StatusCode.NOT_FOUND, BadRequestError),
        (grpc.StatusCode.UNIMPLEMENTED, OutriderError),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_error_of_the_service_is_one_of_the_client(gateway, code, kind):
    script, address = gateway
    script.breaks, script.code = [0] * 100, code
    with Client(address, patience_s=0.0) as client, pytest.raises(OutriderError, match=r"^gone$") as raised:
        client.generate("x").read()
    assert type(raised.value) is kind


def test_error_of_a_full_queue_tells_when_to_ask_again(gateway):
    script, address = gateway
    script.breaks, script.code, script.retry_after_ms = [0], grpc.StatusCode.RESOURCE_EXHAUSTED, 1500
    with Client(address, patience_s=1.0) as client, pytest.raises(ServiceOverloadedError) as raised:
        client.generate("x").read()
    assert raised.value.retry_after_s == 1.5
    assert len(script.seeds) == 1  # the wait would outlast the patience


def test_error_of_a_wrong_field_names_it(gateway):
    script, address = gateway
    script.breaks, script.code = [0], grpc.StatusCode.INVALID_ARGUMENT
    script.details = "speculation.depth: Input should be at most 16, got 99"
    with Client(address) as client, pytest.raises(BadRequestError) as raised:
        client.generate("x").read()
    assert raised.value.field == "speculation.depth"


def test_client_that_is_closed_says_so(gateway):
    _, address = gateway
    with Client(address) as client:
        answer = client.generate("x")
    with pytest.raises(OutriderError, match="the client is closed"):
        answer.read()
    with pytest.raises(OutriderError, match="the client is closed"):
        client.loads()


def test_chat_sends_its_messages(gateway):
    script, address = gateway
    with Client(address) as client:
        assert client.chat([{"role": "user", "content": "Hi"}], max_tokens=5).read() == TEXT
    assert script.chats == [[("user", "Hi")]]
