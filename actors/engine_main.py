"""``python -m actors.engine_main SOCKET FRONTEND``: the process of an engine.

The frontend of its worker, whose process id is FRONTEND, starts it (actors/engine_process.py). SOCKET is the
descriptor of an inherited socket, its only connection. The process does not outlive the frontend.
"""

import logging
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

from actors.connection import Connection
from actors.messages import Meeting, ProcessPlace, Ready, StartEngine, ToEngine, Unbuilt, decode_to_engine
from actors.place import address, place_of
from actors.process import freeze_heap, importing, leave
from outrider.decoding.parent_process import end_with
from outrider.demo.written_out import write_out
from outrider.telemetry.debug_lines import show_debug_lines

if TYPE_CHECKING:
    from actors.watchdog import Loading
    from outrider.engine.loop.engine import Engine

logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> None:
    descriptor, frontend = map(int, arguments)
    end_with(frontend)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the frontend handles Ctrl-C and ends this process
    logging.basicConfig(format="%(levelname)s %(asctime)s engine of %(process)d: %(message)s")
    show_debug_lines()
    connection = Connection[ToEngine](socket.socket(fileno=descriptor), decode_to_engine)
    while not (messages := connection.receive()):
        pass  # only a part of the message has arrived
    (start,) = messages
    assert isinstance(start, StartEngine)
    started = time.perf_counter()
    with importing():
        from actors.engine_loop import EngineLoop
        from actors.watchdog import loading, watch
        from outrider.engine.loop.survey import survey
        from outrider.engine.planning.device_room import within_share
    imports_s = time.perf_counter() - started
    try:
        with loading(start.settings.load_timeout_s, leave) as load, within_share(start.settings):
            place = place_of(start.settings, 0)
            connection.send(place)
            engine = _build(start, connection, place, load)
            surveyed = survey(engine)
    except Exception as error:
        logger.exception("the engine cannot be built")
        connection.send(Unbuilt(type(error).__name__, str(error)))
        return
    engine.warm_up()
    freeze_heap()
    loop = EngineLoop(engine, connection)
    watch(loop, start.settings.step_timeout_s)
    connection.send(
        Ready(
            engine.settings,
            engine.vocab_size,
            engine.max_length,
            engine.runner.slow_because,
            engine.runner.promise,
            imports_s,
            engine.runner.load_timings,
            surveyed,
        )
    )
    try:
        with within_share(start.settings):
            loop.run()
    except Exception as error:
        logger.exception("the engine failed")
        leave(f"the engine failed: {error!r}")
    os._exit(0)  # skips the interpreter's shutdown, at which libraries print warnings


def _build(
    start: StartEngine, connection: "Connection[ToEngine]", place: ProcessPlace, load: "Loading"
) -> "Engine":
    """Returns the loaded engine. Raises the error of an engine that cannot be built."""
    from outrider.engine.loop.engine import Engine
    from outrider.engine.planning.device_room import bound_allocator

    write_out(start.settings.model)
    bound_allocator(start.settings)
    if start.host is None:
        return Engine.from_settings(start.settings)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from actors.meeting import meet

    store = TCPStore(start.host, 0, is_master=True, wait_for_workers=False)  # on a free port
    connection.send(Meeting(store.port))
    group = meet(start.settings, store, 0, address(start.host, place), load)
    return Engine.from_settings(start.settings, group)


if __name__ == "__main__":
    main(sys.argv[1:])
