"""Workers at a distance: behind relays that make every hop take longer."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection

from gateway.workers.streams import WorkerInfo
from tests.support.process_worker import process_of
from tests.support.relay import relay


def serve_relay(address: str, delay_s: float, ready: Connection) -> None:
    """The process of a relay, until it is ended."""

    async def serve() -> None:
        async with relay(address, delay_s) as near:
            ready.send(near)
            await asyncio.Event().wait()

    asyncio.run(serve())


@contextmanager
def at_distance(workers: Sequence[WorkerInfo], delay_ms: float) -> Iterator[list[WorkerInfo]]:
    """Returns the workers behind relays; without a delay the workers themselves."""
    if not delay_ms:
        yield list(workers)
        return
    with ExitStack() as stack:
        moved = []
        for worker in workers:
            address = stack.enter_context(process_of(serve_relay, worker.address, delay_ms / 1e3))
            moved.append(replace(worker, address=address))
        yield moved
