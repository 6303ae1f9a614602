"""X-Request-Id: the caller's own name for a request, or one of ours, on every answer."""

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
ACCEPTED = re.compile(r"[!-~]{1,128}")  # what others write into a log unharmed
KEY = "outrider.request_id"  # of the ASGI scope


class RequestIds:
    """ASGI middleware. An id that is too long, or has other than visible ASCII characters, is replaced."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope).get(HEADER, "")
            scope[KEY] = given if ACCEPTED.fullmatch(given) else uuid.uuid4().hex

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(id_header(scope))
            await send(message)

        await self._app(scope, receive, named)


def id_header(scope: Scope) -> dict[str, str]:
    """For an answer to the request of that scope."""
    return {HEADER: scope[KEY]} if KEY in scope else {}
