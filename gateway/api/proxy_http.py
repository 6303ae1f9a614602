"""Limit on the size of an HTTP request's head, in Serve's proxy process."""

from uvicorn import config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 2**16  # request line and headers together; common servers accept 8 to 64 KiB


class BoundedHttp(HttpToolsProtocol):
    """Refuses endless headers before a body, and endless chunk heads and trailers after it.

    The parser keeps a header until its end, and copies all of it with each piece that arrives. Without a
    limit one connection could use all memory and all processor time of the process.
    """

    _held = 0  # bytes since the parser last completed a part of the request

    def data_received(self, data: bytes) -> None:
        self._held += len(data)
        super().data_received(data)
        if self._held > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of the request exceeds {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._held = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._held = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._held = 0
        super().on_message_complete()


def bound_heads() -> None:
    """Sets the limit for all uvicorn servers that start in this process later."""
    config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{BoundedHttp.__name__}"
