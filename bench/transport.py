"""What could carry the messages between a worker's front and its engine: `python -m bench transport`.

The front's end is an event loop, the engine's end waits. Compared are a pair of sockets as the workers use it
(actors/connection.py), multiprocessing's pipe, read where the event loop says that there is something, and
ZeroMQ, which has a thread of its own in each process (`pip install pyzmq`; left out where that is missing).
An engine in a process of its own sends back what it gets. It tells how long that takes, and the processor
time of each side.
"""

import argparse
import asyncio
import importlib
import importlib.util
import multiprocessing.connection
import os
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from actors.connection import HEAD, Connection, Frames
from bench.report import save, table
from tests.support.process_worker import process_of

WARM_UP = 50  # messages
SOCKETS, PIPE, ZEROMQ = "a pair of sockets", "a pipe", "ZeroMQ"

Exchange = Callable[[bytes], Awaitable[bytes]]


def echo_by_sockets(connected: socket.socket, ready: Pipe) -> None:
    ready.send(os.getpid())
    connection: Connection[bytes] = Connection(connected, lambda content: [content])
    while True:
        for content in connection.receive():
            connected.sendall(frame_of_bytes(content))


def frame_of_bytes(content: bytes) -> bytes:
    """A frame of content that needs no coding."""
    return len(content).to_bytes(HEAD) + content


class _Front(asyncio.Protocol):
    def __init__(self) -> None:
        self._frames = Frames()
        self.arrived: asyncio.Queue[bytes] = asyncio.Queue()

    def data_received(self, data: bytes) -> None:
        for content in self._frames.take(data):
            self.arrived.put_nowait(content)


@asynccontextmanager
async def by_sockets() -> AsyncIterator[tuple[int, Exchange]]:
    ours, theirs = socket.socketpair()
    with process_of(echo_by_sockets, theirs) as process_id:
        transport, front = await asyncio.get_running_loop().create_connection(_Front, sock=ours)

        async def exchange(content: bytes) -> bytes:
            transport.write(frame_of_bytes(content))
            return await front.arrived.get()

        yield process_id, exchange
        transport.close()


def echo_by_pipe(connected: Pipe, ready: Pipe) -> None:
    ready.send(os.getpid())
    while True:
        connected.send_bytes(connected.recv_bytes())


@asynccontextmanager
async def by_pipe() -> AsyncIterator[tuple[int, Exchange]]:
    ours, theirs = multiprocessing.connection.Pipe()
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes] = asyncio.Queue()
    with process_of(echo_by_pipe, theirs) as process_id:
        loop.add_reader(ours.fileno(), lambda: arrived.put_nowait(ours.recv_bytes()))

        async def exchange(content: bytes) -> bytes:
            ours.send_bytes(content)
            return await arrived.get()

        yield process_id, exchange
        loop.remove_reader(ours.fileno())


def echo_by_zeromq(address: str, ready: Pipe) -> None:
    zmq: Any = importlib.import_module("zmq")
    connected = zmq.Context().socket(zmq.PAIR)
    connected.connect(address)
    ready.send(os.getpid())
    while True:
        connected.send(connected.recv())


@asynccontextmanager
async def by_zeromq() -> AsyncIterator[tuple[int, Exchange]]:
    zmq: Any = importlib.import_module("zmq.asyncio")
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        address = f"ipc://{Path(folder) / 'engine'}"
        ours: Any = context.socket(importlib.import_module("zmq").PAIR)
        ours.bind(address)
        with process_of(echo_by_zeromq, address) as process_id:

            async def exchange(content: bytes) -> bytes:
                await ours.send(content)
                received: bytes = await ours.recv()
                return received

            yield process_id, exchange
        ours.close(linger=0)


WAYS = {SOCKETS: by_sockets, PIPE: by_pipe, ZEROMQ: by_zeromq}


async def measure(way: str, size: int, messages: int) -> dict[str, float]:
    """Milliseconds per message and its answer."""
    async with WAYS[way]() as (process_id, exchange):
        engine = psutil.Process(process_id)

        def spent() -> tuple[float, float, float]:
            return time.perf_counter(), time.process_time(), sum(engine.cpu_times()[:2])

        content = os.urandom(size)
        for _ in range(WARM_UP):
            assert await exchange(content) == content
        before = spent()
        for _ in range(messages):
            await exchange(content)
        took, front, of_engine = (after - start for after, start in zip(spent(), before, strict=True))
    per_message = 1e3 / messages
    return {
        "there and back, ms": took * per_message,
        "front, ms": front * per_message,
        "engine, ms": of_engine * per_message,
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench transport", description=__doc__.partition("\n")[0])
    parser.add_argument("--bytes", type=int, nargs="+", default=[300, 10_000, 100_000], dest="sizes")
    parser.add_argument("--messages", type=int, default=5000)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args(arguments)
    ways = [way for way in WAYS if way != ZEROMQ or importlib.util.find_spec("zmq")]
    rows = []
    for size in options.sizes:
        taken: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(options.repetitions):
            for way in ways:
                taken[way].append(asyncio.run(measure(way, size, options.messages)))
        for way, times in taken.items():
            medians = {name: statistics.median(one[name] for one in times) for name in times[0]}
            rows.append({"bytes": size, "transport": way, **medians})
    print(table(rows))
    print(save("transport", rows))
