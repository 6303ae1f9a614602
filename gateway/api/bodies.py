"""Reads the bodies of HTTP requests, with limits on their length, time and number."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from gateway.errors import InvalidRequestError
from gateway.generation.generation import Generation
from gateway.settings import BODIES_AT_ONCE

GZIP = 16 + zlib.MAX_WBITS  # zlib's value of wbits for streams with a gzip header
CLOSE = {"Connection": "close"}  # a client that has not sent its whole body must stop sending


@dataclass(frozen=True)
class Body:
    text: bytes
    deadline: float  # deadline of the request, in the event loop's time


class Bodies:
    """Reads bodies, so that slow or numerous bodies do not block a gateway."""

    def __init__(self, max_bytes: int, within_s: float) -> None:
        """within_s: seconds within which a body must arrive."""
        self._max_bytes = max_bytes
        self._within_s = within_s
        self._reading: dict[asyncio.Timeout, None] = {}  # timeouts of the reads under way, oldest first

    async def read(self, request: HttpRequest) -> bytes:
        """Returns the whole body.

        Raises:
            InvalidRequestError: its content type is not JSON.
            HTTPException: it is too long, too slow or incomplete, or has an unknown encoding. If too many
                bodies are read at a time, the oldest read is aborted.
        """
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # Browsers let a page of another site send any type but JSON to this machine without a CORS preflight.
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
        except ClientDisconnect as error:  # otherwise the log would show a defect
            raise HTTPException(400, "the client left while it sent the body") from error

    def _begin(self, limit: asyncio.Timeout) -> None:
        self._reading[limit] = None
        if len(self._reading) > BODIES_AT_ONCE:
            oldest = next(iter(self._reading))
            del self._reading[oldest]
            oldest.reschedule(asyncio.get_running_loop().time())

    async def _whole(self, request: HttpRequest) -> bytes:
        unpacks = _unpacker(request)
        body = bytearray()
        try:
            async for part in request.stream():
                # Decompression stops a byte beyond the limit, so a small compressed body cannot fill the
                # memory.
                body += part if unpacks is None else unpacks.decompress(part, self._max_bytes + 1 - len(body))
                if len(body) > self._max_bytes:
                    raise HTTPException(413, f"the body exceeds {self._max_bytes} bytes", CLOSE)
        except zlib.error as error:
            raise HTTPException(400, f"the body is not packed with gzip: {error}", CLOSE) from error
        if unpacks is not None and not unpacks.eof:
            raise HTTPException(400, "the end of the packed body is missing")
        return bytes(body)


def _unpacker(request: HttpRequest) -> "zlib._Decompress | None":
    """Returns the decompressor of the body; None if it is not compressed. Raises HTTPException."""
    packing = request.headers.get("content-encoding", "identity").strip().lower()
    if packing not in ("identity", "gzip"):
        raise HTTPException(415, "Content-Encoding: gzip or identity is accepted", CLOSE)
    return zlib.decompressobj(GZIP) if packing == "gzip" else None


class Entrance:
    """Entry of every HTTP request with a body."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        settings = generation.settings
        self._bodies = Bodies(settings.max_message_bytes, settings.body_timeout_s)

    @asynccontextmanager
    async def body(self, request: HttpRequest) -> AsyncIterator[Body]:
        """Reads the body, and holds a permit for the request's preparation while the context is open.

        Raises:
            OverloadedError, DeadlineError: there is no permit.
            InvalidRequestError, HTTPException: ``Bodies.read`` raises them.
        """
        deadline = self._generation.deadline()
        text = await self._bodies.read(request)
        async with self._generation.preparations.permit(deadline):
            yield Body(text, deadline)
