"""Framed messages over a stream socket: a frame is a length of four bytes, followed by its content."""

import select
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from actors.messages import encode

AT_ONCE = 2**20  # most bytes of one read
HEAD = 4  # bytes of the length prefix of a frame

MessageT = TypeVar("MessageT")


def frame_of(messages: Sequence[object]) -> bytes:
    """Returns one frame with these messages."""
    content = encode(messages)
    return len(content).to_bytes(HEAD) + content


class Frames:
    """Incremental parser that takes received bytes, and yields the content of each complete frame."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def take(self, data: bytes) -> Iterator[bytes]:
        self._pending += data
        while len(self._pending) >= HEAD:
            end = HEAD + int.from_bytes(self._pending[:HEAD])
            if len(self._pending) < end:
                return
            content = bytes(self._pending[HEAD:end])
            del self._pending[:end]
            yield content


class Connection(Generic[MessageT]):
    """Blocking end of a connection, for the engine, and for the frontend until the engine is loaded."""

    def __init__(self, connected: socket.socket, decode: Callable[[bytes], list[MessageT]]) -> None:
        self._socket = connected
        self._decode = decode
        self._frames = Frames()

    def send(self, *messages: object) -> None:
        """Sends the messages in one frame. Raises OSError if the other end is closed."""
        self._socket.sendall(frame_of(messages))

    def has_come(self) -> bool:
        """Whether ``receive`` would not block: messages have arrived, or the other end is closed."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def receive(self, timeout: float | None = None) -> list[MessageT]:
        """Returns the messages of complete frames, after at most ``timeout`` seconds; may be empty.

        Raises:
            EOFError: the other end is closed.
        """
        if not select.select([self._socket], [], [], timeout)[0]:
            return []
        try:
            data = self._socket.recv(AT_ONCE)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError
        return [message for content in self._frames.take(data) for message in self._decode(content)]
