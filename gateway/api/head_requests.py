"""Support of HEAD, which asks for the status and the headers of a GET."""

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadRequests:
    """ASGI middleware that answers HEAD as GET. The server omits the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # a copy: the server's own scope keeps HEAD
        await self._app(scope, receive, send)
