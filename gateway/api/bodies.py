"""Bodies of HTTP requests: how long they may be, and how many may be read and prepared at a time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from gateway.errors import InvalidRequestError
from gateway.generation.generation import Generation
from gateway.settings import BODIES_AT_ONCE

CLOSE = {"Connection": "close"}  # whoever did not send all of it may not go on sending for ever


@dataclass(frozen=True)
class Body:
    text: bytes
    deadline: float  # the request's, in the event loop's time


class Bodies:
    """Reads bodies. Neither slow ones nor many of them keep a gateway from others."""

    def __init__(self, max_bytes: int, within_s: float) -> None:
        """within_s: seconds in which a body has to come."""
        self._max_bytes = max_bytes
        self._within_s = within_s
        self._reading: dict[asyncio.Timeout, None] = {}  # the one that is read for longest first

    async def read(self, request: HttpRequest) -> bytes:
        """Returns the whole body.

        Raises:
            InvalidRequestError: it is no JSON, by its type.
            HTTPException: it is too long, comes too slowly, or ends before its end. Where too many are read,
                the one that is read for longest gives way to the newest.
        """
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # Any page in a browser may send another type to a service on its machine, JSON only with its consent.
        if content_type != "application/json":
            raise InvalidRequestError("body", "Content-Type: application/json is accepted")
        try:
            async with asyncio.timeout(self._within_s) as limit:
                self._begin(limit)
                try:
                    return await self._whole(request)
                finally:
                    self._reading.pop(limit, None)
        except TimeoutError as error:
            raise HTTPException(
                408, f"the body came too slowly: {self._within_s:g} s are accepted, less under load", CLOSE
            ) from error
        except ClientDisconnect as error:  # nobody hears it, and it is no defect for the log
            raise HTTPException(400, "the client left while it sent the body") from error

    def _begin(self, limit: asyncio.Timeout) -> None:
        self._reading[limit] = None
        if len(self._reading) > BODIES_AT_ONCE:
            oldest = next(iter(self._reading))
            del self._reading[oldest]
            oldest.reschedule(asyncio.get_running_loop().time())

    async def _whole(self, request: HttpRequest) -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._max_bytes:
                raise HTTPException(413, f"the body exceeds {self._max_bytes} bytes", CLOSE)
        return bytes(body)


class Entrance:
    """The way in of every request with a body."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        settings = generation.settings
        self._bodies = Bodies(settings.max_message_bytes, settings.body_timeout_s)

    @asynccontextmanager
    async def body(self, request: HttpRequest) -> AsyncIterator[Body]:
        """Reads the body, and keeps a place for the work that comes before an answer, while this is open.

        Raises:
            OverloadedError, DeadlineError: there is no place.
            InvalidRequestError, HTTPException: as ``Bodies.read``.
        """
        deadline = self._generation.deadline()
        text = await self._bodies.read(request)
        async with self._generation.preparations.place(deadline):
            yield Body(text, deadline)
