"""A target worker in a process of its own, without Ray: ``python -m tests.support.worker_process TOKEN``.

It prints what it publishes, and ends with its standard input, or at once where it is fed the token.
"""

import asyncio
import json
import os
import sys
from typing import Any

from actors.engine_loop import EngineLoop
from actors.servicers import TargetServicer
from actors.worker import start_server
from outrider.engine.engine import Engine
from protos import rounds_pb2_grpc
from tests.support.model import model_of
from tests.support.service import TRUST, engine_settings

KILLED = 9  # exit status


def killed_by(engine: Engine, token: int) -> None:
    """Has the process end in the middle of a step, as a defect in a library's kernel would end it."""
    forward = model_of(engine).forward

    def harmed(*args: Any, **kwargs: Any) -> Any:
        if (kwargs["input_ids"] == token).any():
            os._exit(KILLED)
        return forward(*args, **kwargs)

    model_of(engine).forward = harmed


async def main(token: int) -> None:
    engine_loop = await asyncio.to_thread(EngineLoop, lambda: Engine.from_settings(engine_settings("target")))
    engine_loop.attach(asyncio.get_running_loop())
    killed_by(engine_loop.engine, token)

    def add(server: Any) -> None:
        rounds_pb2_grpc.add_TargetWorkerServicer_to_server(TargetServicer(engine_loop), server)

    server, address = await start_server(add, "127.0.0.1", TRUST)
    engine = engine_loop.engine
    found = {"address": address, "vocab_size": engine.vocab_size, "max_length": engine.max_length}
    print(json.dumps({**found, "pid": os.getpid()}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)
    engine_loop.stop()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
