"""Live page at the gateway's root: static files, without resources of other sites."""

import os
from pathlib import Path, PurePath

from fastapi import FastAPI
from fastapi.responses import FileResponse
from starlette.staticfiles import StaticFiles

FILES = Path(__file__).parent
# The page contains no secrets: it requests what it shows with the visitor's own API key.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


SERVED = (".html", ".css", ".js")  # the folders also hold Python modules


class PageFiles(StaticFiles):
    """Static files of a folder for a browser; files with other suffixes are not found."""

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        return super().lookup_path(path) if PurePath(path).suffix in SERVED else ("", None)


def add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(FILES / "index.html", headers=HEADERS)

    app.mount("/page", PageFiles(directory=FILES))
