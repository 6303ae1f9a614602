"""X-Request-Id, in and out."""

import httpx
import pytest

from gateway.generation.generation import Generation
from tests.support.http_calls import ASK

HEADER = "X-Request-Id"


@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere", "/tokenize"])
async def test_the_caller_s_own_comes_back_on_every_answer(client, path):
    response = await client.post(path, json=ASK, headers={HEADER: "mine-1"})
    assert response.headers[HEADER] == "mine-1"


async def test_a_stream_has_it_too(client):
    ask = {**ASK, "stream": True}
    response = await client.post("/v1/completions", json=ask, headers={HEADER: "mine-2"})
    assert response.headers[HEADER] == "mine-2"


@pytest.mark.parametrize("given", [{}, {HEADER: ""}, {HEADER: "x" * 129}, {HEADER: "a b"}], ids=str)
async def test_a_request_without_one_that_can_be_kept_is_given_one(client, given):
    told = [(await client.post("/v1/completions", json=ASK, headers=given)).headers[HEADER] for _ in range(2)]
    assert all(len(one) == 32 and one.isalnum() for one in told)
    assert told[0] != told[1]


async def test_an_answer_to_a_defect_has_it(client, monkeypatch):
    def fails(self):
        raise ZeroDivisionError

    monkeypatch.setattr(Generation, "max_length", fails)
    app = client._transport.app
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as other:
        response = await other.post("/v1/completions", json=ASK, headers={HEADER: "mine-3"})
    assert (response.status_code, response.headers[HEADER]) == (500, "mine-3")
