"""Bound on the head of an HTTP request, in the process that reads it for Serve."""

from uvicorn import config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 2**16  # request line and headers together; usual servers take 8 to 64 KiB


class BoundedHttp(HttpToolsProtocol):
    """Refuses what goes on without an end before a body, and between and after its pieces.

    The parser keeps a header until it ends and copies all of it with each piece that arrives. Without a bound
    one connection could take all memory and the whole time of the process.
    """

    _held = 0  # bytes since the parser last handed over anything that ends

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
    """Bounds the heads that servers of uvicorn read which start in this process from now on."""
    config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{BoundedHttp.__name__}"
