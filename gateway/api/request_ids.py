"""X-Request-Id: the caller's own name for a request, or the one that Serve's proxy has drawn.

The proxy puts the header on every answer, so the app does not: two layers would answer two headers.
"""

import re
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

HEADER = "X-Request-Id"
HIDDEN = re.compile(r"[^!-~]")  # characters that could harm what others write into a log
LONGEST = 128  # characters of an id in a trace
KEY = "outrider.request_id"  # key of the ASGI scope


class RequestIds:
    """ASGI middleware that keeps the request's id in its scope, fit for traces and logs."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope).get(HEADER, "")
            scope[KEY] = HIDDEN.sub("?", given)[:LONGEST] or uuid.uuid4().hex
        await self._app(scope, receive, send)
