"""Channels for messages about steps from rank 0 to the other ranks: shared memory on one node, else gloo."""

import mmap
import os
import select
import socket
import struct
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from outrider.engine.errors import RankLostError
from outrider.engine.inputs.step_input import Numbers

FRAME = 8192  # numbers of gloo's first broadcast; the rest of a message follows in a second broadcast
RING = 2**17  # numbers, 1 MB: room for a hundred verification steps of 64 sequences
LINE = 8  # numbers in a CPU cache line: each reader's count has its own line
# Packet: numbers sent before the piece, numbers of the piece, and numbers of its message still to come.
PACKET = struct.Struct("=3q")
CREDENTIALS = struct.Struct("=3i")  # process, user and group at the other end of a connection
NAME = "outrider/steps"  # key in the store
LOOK_MS = 1  # milliseconds between checks for room in a full ring


class StepChannel(Protocol):
    """Channel for messages from rank 0 to all other ranks."""

    def send(self, numbers: Numbers) -> None:
        """Sends a message from rank 0. Raises RankLostError."""

    def receive(self) -> Numbers:
        """Returns the next message at another rank. Raises RankLostError."""


class OverGloo:
    """Channel by broadcasts, for a group whose ranks share no memory."""

    def __init__(self) -> None:
        self._frame = torch.zeros(FRAME, dtype=torch.int64)

    def send(self, numbers: Numbers) -> None:
        content = torch.from_numpy(numbers)
        begin, rest = content[: FRAME - 1], content[FRAME - 1 :]
        self._frame[0] = len(content)
        self._frame[1 : 1 + len(begin)] = begin
        broadcast(self._frame)
        if len(rest):
            broadcast(rest)

    def receive(self) -> Numbers:
        broadcast(self._frame)
        length = int(self._frame[0])
        numbers = self._frame[1 : 1 + length]
        if length > len(numbers):
            rest = torch.empty(length - len(numbers), dtype=torch.int64)
            broadcast(rest)
            numbers = torch.cat([numbers, rest])
        found: Numbers = numbers.numpy()
        return found


class OverSharedMemory:
    """Channel by a ring buffer in memory that all ranks of a node share.

    Rank 0 writes a piece of a message into the ring, then sends a packet about it to each rank. A rank sleeps
    in the kernel until a packet arrives; the piece is visible then. A connection closes when the process at
    its other end ends for any reason.
    """

    def __init__(self, memory: int, connections: Sequence[socket.socket], reader: int = 0) -> None:
        """
        Args:
            memory: descriptor of the memory.
            connections: connections of rank 0 to each reader, or of a reader to rank 0.
            reader: number of this reader.
        """
        self._connections, self._reader = connections, reader
        self._moved = 0  # numbers of all messages so far, written at rank 0 and read at a reader
        self._memory = mmap.mmap(memory, os.fstat(memory).st_size)
        numbers = np.frombuffer(self._memory, np.int64)
        counts, self._ring = numbers[:-RING], numbers[-RING:]
        self._read = counts[::LINE]  # numbers that each reader has read
        self._ends = select.poll()
        for connection in connections:
            self._ends.register(connection, 0)  # reports only the end of a connection

    def send(self, numbers: Numbers) -> None:
        pieces = [numbers[begin : begin + RING] for begin in range(0, len(numbers), RING)]
        left = len(numbers)
        for piece in pieces:
            self._await_room(len(piece))
            first, second = _places(self._moved, len(piece))
            self._ring[first], self._ring[second] = np.split(piece, [first.stop - first.start])
            left -= len(piece)
            packet = PACKET.pack(self._moved, len(piece), left)
            self._moved += len(piece)
            try:
                for connection in self._connections:
                    connection.send(packet)
            except OSError as error:
                raise RankLostError(f"a rank of the group is gone: {error}") from error

    def receive(self) -> Numbers:
        pieces, left = list[Numbers](), 1
        while left:
            before, count, left = self._packet()
            if before != self._moved:
                raise RankLostError(f"rank 0 has sent {before} numbers, of which {self._moved} came here")
            pieces += [self._ring[places].copy() for places in _places(before, count)]
            self._moved += count
            self._read[self._reader] = self._moved
        return np.concatenate(pieces)

    def _packet(self) -> tuple[int, int, int]:
        try:
            packet = self._connections[0].recv(PACKET.size)
        except OSError as error:
            raise RankLostError(f"rank 0 of the group is gone: {error}") from error
        if not packet:
            raise RankLostError("rank 0 of the group is gone: its connection has ended")
        before, count, left = PACKET.unpack(packet)
        return before, count, left

    def _await_room(self, count: int) -> None:
        """Waits until all readers have read what the next numbers overwrite. Raises RankLostError."""
        while self._moved + count - int(self._read.min()) > RING:
            if self._ends.poll(LOOK_MS):
                raise RankLostError("a rank of the group is gone: its connection has ended")


def _places(before: int, count: int) -> tuple[slice, slice]:
    """Returns the places in the ring of numbers after ``before`` numbers; the second slice wraps around."""
    start = before % RING
    stop = min(start + count, RING)
    return slice(start, stop), slice(0, count - (stop - start))


def shared_memory(readers: int) -> int:
    """Returns the descriptor of memory for a ring. It has no name, and is freed after its last process."""
    memory = os.memfd_create("outrider-steps")
    os.ftruncate(memory, 8 * (LINE * readers + RING))
    return memory


def step_channel(store: TCPStore, rank: int, size: int, least: Callable[[int], int]) -> StepChannel:
    """Returns a channel by shared memory if all ranks can reach rank 0, else by gloo.

    All ranks must call it.

    least: returns the smallest of all ranks' numbers.
    """
    if sys.platform != "linux":
        return OverGloo()  # only Linux has anonymous memory files and abstract addresses
    if rank:
        connection = _reached(store.get(NAME).decode())
        if least(connection is not None):
            assert connection is not None
            number, [memory], _, _ = socket.recv_fds(connection, 1, 1)
            return _closing(memory, [connection], number[0])
        return OverGloo()
    name = uuid.uuid4().hex
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(_address(name))
        listener.listen(size)
        store.set(NAME, name)
        if not least(True):
            return OverGloo()
        memory, connections = shared_memory(size - 1), list[socket.socket]()
        while len(connections) < size - 1:
            connection, _ = listener.accept()
            if _is_of_this_user(connection):
                socket.send_fds(connection, [bytes([len(connections)])], [memory])
                connections.append(connection)
    return _closing(memory, connections)


def _closing(memory: int, connections: Sequence[socket.socket], reader: int = 0) -> OverSharedMemory:
    """Returns the channel and closes the descriptor, which is not needed once the memory is mapped."""
    channel = OverSharedMemory(memory, connections, reader)
    os.close(memory)
    return channel


def _reached(name: str) -> socket.socket | None:
    """Returns a connection to rank 0; None: it is on another node, or in another container."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(_address(name))
    except OSError:
        connection.close()
        return None
    return connection if _is_of_this_user(connection) else None


def _address(name: str) -> str:
    """Returns an abstract address, which is in no file system and vanishes with the listening process."""
    return f"\0outrider-{name}"


def _is_of_this_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this user, since no other user may read a step."""
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(given)
    return bool(user == os.getuid())


def broadcast(numbers: torch.Tensor) -> None:
    """Broadcasts from rank 0 to all ranks. Raises RankLostError."""
    try:
        dist.broadcast(numbers, 0)
    except RuntimeError as error:  # gloo's error for a closed connection
        raise RankLostError(f"a rank of the group is gone: {error}") from error
