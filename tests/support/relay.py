"""TCP relay on the loopback interface that adds a delay to every hop, like a network."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

CHUNK = 65536


@asynccontextmanager
async def relay(address: str, delay_s: float) -> AsyncIterator[str]:
    """Yields the address of a relay to ``address``, which delays data by ``delay_s`` in both directions."""
    host, port = address.split(":")
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection(host, int(port))
        for source, sink in ((reader, other_writer), (other_reader, writer)):
            task = asyncio.create_task(_carry(source, sink, delay_s))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in [*tasks]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter, delay_s: float) -> None:
    """Forwards pieces in order, each at its own due time, so that the delay does not limit the throughput."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                return
            sink.write(data)
            await sink.drain()

    delivering = asyncio.create_task(deliver())
    try:
        while data := await source.read(CHUNK):
            under_way.put_nowait((loop.time() + delay_s, data))
        under_way.put_nowait((loop.time() + delay_s, b""))
        await delivering
    except ConnectionError:
        pass
    finally:
        delivering.cancel()
        sink.close()
