"""Files of the live page: complete, free to read, and without resources from elsewhere."""

import re

import pytest

from gateway.api.page import FILES
from tests.support.http_calls import client_of

SOURCES = sorted(path for path in FILES.iterdir() if path.suffix in (".html", ".js", ".css"))


@pytest.fixture
async def stranger(tokenizer):
    """Client without a key, at a service that needs keys."""
    async with client_of(tokenizer, keys=["secret"], host="10.0.0.9") as client:
        yield client


async def test_page_and_its_files_need_no_key(stranger):
    page = await stranger.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    named = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
    assert named
    for path in [*named, *(f"page/{source.name}" for source in SOURCES)]:
        assert (await stranger.get(f"/{path}")).status_code == 200, path


@pytest.mark.parametrize(
    "path", ["/page/__init__.py", "/page/", "/docs-page/__init__.py", "/docs-page/description.py"]
)
async def test_modules_beside_the_pages_are_not_served(stranger, path):
    assert (await stranger.get(path)).status_code == 404


async def test_page_data_needs_the_key(stranger):
    assert (await stranger.get("/loads")).status_code == 401
    assert (await stranger.get("/loads", headers={"authorization": "Bearer secret"})).status_code == 200
    assert "gateway" not in (await stranger.get("/health")).json()


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_page_loads_nothing_from_elsewhere(source):
    addresses = re.findall(r"https?://[^\s\"')]+", source.read_text())
    assert {*addresses} <= {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_page_text_never_becomes_markup(source):
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\son\w+=", source.read_text()
    )
