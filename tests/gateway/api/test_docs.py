"""The page that shows the OpenAPI description fetches nothing from elsewhere."""

import re

from gateway.api import docs


async def test_docs_page_loads_nothing_from_elsewhere(client):
    page = await client.get("/docs")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    parts = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    for part in parts:
        assert (await client.get(f"/{part}")).status_code == 200, part
    for file in ("index.html", "docs.js", "docs.css"):
        assert not re.search(r"https?://", (docs.FILES / file).read_text())
