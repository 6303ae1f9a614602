"""Endpoints that need no worker: tokenize, detokenize, version and ping."""

from importlib.metadata import version

import pytest

from tests.fakes.scripted import MAX_LENGTH
from tests.support.http_calls import CHAT, client_of


async def test_tokenize_and_detokenize_return_the_text(client):
    told = (await client.post("/tokenize", json={"prompt": "sät"})).json()
    assert told == {"tokens": [*"sät".encode()], "count": 4, "max_model_len": MAX_LENGTH}
    back = await client.post("/detokenize", json={"tokens": told["tokens"]})
    assert back.json() == {"prompt": "sät"}


async def test_tokenize_with_return_token_strs_spells_tokens(client):
    told = (await client.post("/tokenize", json={"prompt": "ab", "return_token_strs": True})).json()
    assert told["token_strs"] == ["a", "b"]


async def test_tokenize_chat_has_the_template_s_tokens(client):
    told = (await client.post("/tokenize", json={"messages": CHAT["messages"]})).json()
    assert bytes(told["tokens"]) == b"user:x;"


@pytest.mark.parametrize(
    ("path", "wrong", "field"),
    [
        ("tokenize", {}, "body"),
        ("tokenize", {"prompt": "x", "messages": CHAT["messages"]}, "body"),
        ("tokenize", {"prompt": "x", "truncate": 1}, "truncate"),
        ("detokenize", {"tokens": [10**6]}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": "x"}, "tokens"),
    ],
    ids=str,
)
async def test_tokenize_wrong_field_is_named(client, path, wrong, field):
    response = await client.post(f"/{path}", json=wrong)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def test_request_for_another_model_is_not_found(client):
    for path, ask in (("tokenize", {"prompt": "x"}), ("detokenize", {"tokens": []})):
        assert (await client.post(f"/{path}", json={**ask, "model": "other"})).status_code == 404


async def test_tokenize_unknown_caller_is_refused(tokenizer):
    async with client_of(tokenizer, None, keys=["k"]) as client:
        assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 401
        assert (await client.post("/detokenize", json={"tokens": []})).status_code == 401


async def test_version_is_that_of_the_package(client):
    assert (await client.get("/version")).json() == {"version": version("outrider")}


async def test_ping_tells_whether_a_request_can_be_answered(tokenizer, client):
    assert (await client.get("/ping")).status_code == 200
    async with client_of(tokenizer, None) as alone:
        assert (await alone.get("/ping")).status_code == 503
