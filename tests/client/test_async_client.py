"""Client for programs with an event loop: the answers of the other client, piece by piece."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from outrider.client import answer as answers
from outrider.client.async_client import AsyncClient
from outrider.client.errors import BadRequestError, OutriderError, ServiceUnavailableError
from outrider.learning.backoff import Backoff
from tests.fakes.text_gateway import SEED, TEXT, TOKENS, TextGateway, serving


@pytest.fixture
def gateway(monkeypatch) -> Iterator[tuple[TextGateway, str]]:
    monkeypatch.setattr(answers, "PAUSE", Backoff(0.001, 3.0))
    with serving(TextGateway()) as served:
        yield served


@pytest.mark.parametrize("first", range(0, 7, 2))
async def test_async_answer_that_broke_is_finished_with_the_same_text(gateway, first):
    script, address = gateway
    script.breaks = [first, 2]
    async with AsyncClient(address) as client:
        answer = client.generate("x")
        pieces = [piece async for piece in answer]
    assert [piece.token_id for piece in pieces] == TOKENS
    assert (answer.text, answer.repeats, answer.finish_reason, answer.seed) == (TEXT, 2, "length", SEED)
    assert script.seeds[1] == (None if first == 0 else SEED)


async def test_async_answer_iterated_twice_yields_its_pieces_again_and_asks_once(gateway):
    script, address = gateway
    async with AsyncClient(address) as client:
        answer = client.chat([{"role": "user", "content": "Hi"}])
        assert [piece async for piece in answer] == [piece async for piece in answer]
        assert await answer.read() == TEXT
    assert script.chats == [[("user", "Hi")]]


async def test_async_answer_that_was_left_early_goes_on_with_its_seed(gateway):
    script, address = gateway
    async with AsyncClient(address) as client:
        answer = client.generate("x")
        async for _ in answer:
            break
        assert await answer.read() == TEXT
    assert script.seeds == [None, SEED]


async def test_async_answers_come_side_by_side_over_one_client(gateway):
    script, address = gateway
    async with AsyncClient(address) as client:
        texts = await asyncio.gather(*(client.generate("x").read() for _ in range(5)))
    assert texts == [TEXT] * 5
    assert len(script.seeds) == 5


async def test_async_errors_are_the_client_s_own(gateway):
    script, address = gateway
    script.breaks, script.code = [0], grpc.StatusCode.INVALID_ARGUMENT
    async with AsyncClient(address) as client:
        with pytest.raises(BadRequestError, match="gone"):
            await client.generate("x").read()
    with pytest.raises(OutriderError, match="the client is closed"):
        await client.generate("x").read()
    async with AsyncClient("127.0.0.1:1", patience_s=0.0) as client:
        with pytest.raises(ServiceUnavailableError):
            await client.generate("x").read()


def test_async_client_made_before_the_event_loop_works_in_it(gateway):
    client = AsyncClient(gateway[1])

    async def ask() -> str:
        async with client:
            return await client.generate("x").read()

    assert asyncio.run(ask()) == TEXT


def test_async_example_of_the_page_prints_the_answer(gateway, capsys):
    text = (Path(__file__).parents[2] / "docs/clients.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.S)
    (example,) = (example for example in examples if "import AsyncClient" in example)
    exec(example.replace("127.0.0.1:9000", gateway[1]), {})
    assert capsys.readouterr().out.startswith(TEXT)
