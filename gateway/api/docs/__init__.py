"""The OpenAPI description at /openapi.json, and a page that shows it: no resource from elsewhere."""

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import FileResponse
from starlette.staticfiles import StaticFiles

from gateway.api.page import HEADERS

FILES = Path(__file__).parent
KEY = {"key": {"type": "http", "scheme": "bearer", "description": "needed where the service has API keys"}}


def add_docs(app: FastAPI) -> None:
    @app.get("/docs", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(FILES / "index.html", headers=HEADERS)

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            app.openapi_schema.setdefault("components", {})["securitySchemes"] = KEY
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]
    app.mount("/docs-page", StaticFiles(directory=FILES))
