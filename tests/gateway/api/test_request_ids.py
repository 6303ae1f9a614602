"""X-Request-Id in requests and answers, behind the layer of Serve's proxy that answers it."""

import warnings

import httpx
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve's own use of pydantic is deprecated
    from ray.serve._private.http_util import RequestIdMiddleware

from gateway.api.request_ids import KEY, RequestIds
from gateway.generation.limits import Limits
from tests.support.http_calls import ASK

HEADER = "X-Request-Id"


@pytest.fixture
async def proxied(client):
    """The app as Serve's proxy wraps it."""
    app = RequestIdMiddleware(client._transport.app)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as proxied:
        yield proxied


@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere", "/tokenize"])
async def test_request_id_of_the_caller_is_in_the_answer_once(proxied, path):
    response = await proxied.post(path, json=ASK, headers={HEADER: "mine-1"})
    assert response.headers.get_list(HEADER) == ["mine-1"]


async def test_request_id_of_the_caller_is_in_a_stream_once(proxied):
    response = await proxied.post("/v1/completions", json={**ASK, "stream": True}, headers={HEADER: "mine-2"})
    assert response.headers.get_list(HEADER) == ["mine-2"]


async def test_request_id_left_out_is_drawn_for_each_request(proxied):
    told = [(await proxied.post("/v1/completions", json=ASK)).headers.get_list(HEADER) for _ in range(2)]
    assert [len(ids) for ids in told] == [1, 1]
    assert told[0] != told[1]


async def test_request_id_is_in_the_answer_to_a_defect_once(proxied, monkeypatch):
    def fails(self):
        raise ZeroDivisionError

    monkeypatch.setattr(Limits, "max_length", fails)
    response = await proxied.post("/v1/completions", json=ASK, headers={HEADER: "mine-3"})
    assert (response.status_code, response.headers.get_list(HEADER)) == (500, ["mine-3"])


@pytest.mark.parametrize(
    ("given", "kept"),
    [("mine", "mine"), ("x" * 129, "x" * 128), ("a b\tc", "a?b?c")],
    ids=["fit", "long", "odd"],
)
async def test_request_id_is_kept_as_a_trace_can_hold_it(given, kept):
    scopes = []

    async def app(scope, receive, send):
        scopes.append(scope)

    scope = {"type": "http", "headers": [(b"x-request-id", given.encode())]}
    await RequestIds(app)(scope, None, None)
    assert scopes[0][KEY] == kept


async def test_request_id_left_out_is_drawn_for_the_trace():
    scope = {"type": "http", "headers": []}

    async def app(scope, receive, send):
        """Answers nothing."""

    await RequestIds(app)(scope, None, None)
    assert len(scope[KEY]) == 32
