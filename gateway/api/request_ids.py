"""X-Request-Id: the caller's own id of a request, or a random id from Serve's proxy.

The proxy adds the header to every response, so the app must not add it a second time.
"""

import re
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

HEADER = "X-Request-Id"
HIDDEN = re.compile(r"[^!-~]")  # characters that could forge lines of a log
LONGEST = 128  # characters
KEY = "outrider.request_id"  # key of the ASGI scope


class RequestIds:
    """ASGI middleware that keeps the request's id in its scope, made safe for traces and logs."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope).get(HEADER, "")
            scope[KEY] = HIDDEN.sub("?", given)[:LONGEST] or uuid.uuid4().hex
        await self._app(scope, receive, send)
