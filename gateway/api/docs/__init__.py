"""OpenAPI description at /openapi.json, and a page that shows it without resources of other sites."""

import asyncio
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse, JSONResponse

from gateway.api.docs.description import described
from gateway.api.page import HEADERS, PageFiles

FILES = Path(__file__).parent


def add_docs(app: FastAPI) -> None:
    @app.get("/docs", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(FILES / "index.html", headers=HEADERS)

    @app.get("/openapi.json", include_in_schema=False)
    async def description() -> JSONResponse:
        return JSONResponse(await asyncio.to_thread(described, app))  # the first call takes half a second

    app.mount("/docs-page", PageFiles(directory=FILES))
