"""Target worker in a process of its own, without Ray: ``python -m tests.support.worker_process TOKEN``.

It prints what it publishes. It ends when its standard input closes, or at once if it is fed the token.
"""

import asyncio
import json
import os
import sys

from outrider.engine.forward.batch import Batch
from outrider.engine.loop.engine import Engine
from tests.support.local_worker import local_worker
from tests.support.model import before_passes
from tests.support.service import engine_settings

KILLED = 9  # exit status


def killed_by(engine: Engine, token: int) -> None:
    """Makes the process end in the middle of a step, like a crash in a library's kernel."""

    def harmed(batch: Batch) -> None:
        if (batch.token_ids == token).any():
            os._exit(KILLED)

    before_passes(engine, harmed)


async def main(token: int) -> None:
    async with local_worker("target", engine_settings("target")) as worker:
        killed_by(worker.engine, token)
        published = worker.published
        found = {
            "address": worker.address,
            "vocab_size": published.vocab_size,
            "max_length": published.max_length,
        }
        print(json.dumps({**found, "pid": os.getpid()}), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
