"""The OpenAPI description is complete, and the page that shows it fetches nothing from elsewhere."""

import re

import jsonschema  # type: ignore[import-untyped]
import pytest

from gateway.api import docs
from gateway.api.http_api import CHATS, COMPLETIONS, RESPONSES
from gateway.api.text_api import DETOKENIZE, TOKENIZE
from tests.support.http_calls import ASK, CHAT

BODIES = {
    COMPLETIONS: ASK,
    CHATS: CHAT,
    RESPONSES: {"input": "x"},
    TOKENIZE: {"prompt": "x"},
    DETOKENIZE: {"tokens": [1]},
}


async def test_every_path_is_described_in_words(client):
    description = (await client.get("/openapi.json")).json()
    paths = {"/v1/models", "/v1/models/{name}", "/health", "/loads", "/version", "/ping", *BODIES}
    assert paths == description["paths"].keys()
    operations = [operation for path in description["paths"].values() for operation in path.values()]
    assert all(operation.get("description") for operation in operations)
    assert description["info"]["version"]


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_is_described_as_it_is_accepted(client, path):
    operation = (await client.get("/openapi.json")).json()["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert {"200", "400", "401", "429"} <= operation["responses"].keys()
    jsonschema.Draft202012Validator.check_schema(schema)
    for reference in references(schema):
        assert reference.rpartition("/")[2] in schema["$defs"]


def references(part):
    if isinstance(part, list):
        return [reference for item in part for reference in references(item)]
    if not isinstance(part, dict):
        return []
    own = [part["$ref"]] if isinstance(part.get("$ref"), str) else []
    return own + [reference for item in part.values() for reference in references(item)]


async def test_the_page_shows_it_with_nothing_from_elsewhere(client):
    page = await client.get("/docs")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    parts = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    for part in parts:
        assert (await client.get(f"/{part}")).status_code == 200, part
    for file in ("index.html", "docs.js", "docs.css"):
        assert not re.search(r"https?://", (docs.FILES / file).read_text())
