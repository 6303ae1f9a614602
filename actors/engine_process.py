"""Starts and watches the engine's process. Neither the engine nor the frontend outlives the other."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from actors.connection import Connection
from actors.messages import FromEngine, Meeting, ProcessPlace, Ready, StartEngine, Unbuilt, decode_from_engine
from actors.place import confine, meet_at, told
from actors.spinning import bound_spinning
from outrider.engine import errors
from outrider.engine.settings import EngineSettings

logger = logging.getLogger(f"ray.serve.{__name__}")

LOOK_S = 0.1
JOIN_S = 5.0  # seconds that an engine has to exit after its connection was closed
STOPPED_LOOKS = 20  # polls, each LOOK_S apart, after which a stopped process is killed
FOLDER = Path(__file__).parents[1]


class EngineProcess:
    """Process of an engine. ``connection``: the frontend's end of a socket that no other process can open."""

    def __init__(
        self,
        settings: EngineSettings,
        ended: Callable[[str], object],
        gpus: tuple[str, ...] | None = None,
        host: str | None = None,
    ) -> None:
        """
        Args:
            ended: called in a thread, with the reason, if the process fails.
            gpus: ids of the GPUs that the process may see; None: all GPUs.
            host: address of this node, at which other ranks reach rank 0; None: a single rank.
        """
        self.place: ProcessPlace  # set before the engine is ready
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(FOLDER), *filter(None, sys.path)]),
        }
        confine(self._environment, gpus)
        bound_spinning(self._environment)
        if host is not None:
            meet_at(self._environment, host)
        self.connection, engine_end = socket.socketpair()
        self._ended = ended
        self._pid: Future[int] = Future()
        self._status: Future[int] = Future()
        threading.Thread(target=self._live, args=(engine_end,), name="engine process", daemon=True).start()
        self.pid = self._pid.result()
        self._early = Connection[FromEngine](self.connection, decode_from_engine)
        self._early.send(StartEngine(settings, host))

    def ready(self, meet: Callable[[int], object] = lambda port: None) -> Ready:
        """Waits until the engine is loaded.

        Args:
            meet: called with the port at which rank 0 waits for the other ranks.

        Raises:
            EngineError, ValueError: the engine cannot be built with these settings.
            RuntimeError: the engine could not be built for another reason, or its process has ended.
        """
        while True:
            try:
                messages = self._early.receive()
            except EOFError:
                raise RuntimeError(f"the engine's process ended while it loaded: {self._end()}") from None
            for message in messages:
                match message:
                    case ProcessPlace():
                        self.place = message
                        logger.info("%s", told(message))
                    case Meeting():
                        meet(message.port)
                    case Unbuilt():
                        raise _error_of(message)
                    case Ready():
                        return message

    def join(self) -> None:
        """Closes the connection and waits for the process to end; kills it after JOIN_S seconds."""
        self.connection.close()
        try:
            self._status.result(JOIN_S)
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)
            self._status.result()

    def _live(self, engine_end: socket.socket) -> None:
        """Runs the process and waits for its end: the kernel would end the process with this thread."""
        command = [sys.executable, "-m", "actors.engine_main", str(engine_end.fileno()), str(os.getpid())]
        try:
            process = subprocess.Popen(command, pass_fds=[engine_end.fileno()], env=self._environment)
        except BaseException as error:
            self._pid.set_exception(error)
            return
        engine_end.close()
        self._pid.set_result(process.pid)
        self._wait(process)
        self._status.set_result(process.wait())
        if self._status.result() != 0:
            self._ended(f"the engine's process is gone: {self._end()}")

    def _wait(self, process: "subprocess.Popen[bytes]") -> None:
        """Watches the process until it has ended. Kills the process if a signal has stopped it for long."""
        of_it = os.P_PID, process.pid
        while _waited(process).si_code == os.CLD_STOPPED:
            with suppress(ChildProcessError):
                os.waitid(*of_it, os.WSTOPPED | os.WNOHANG)  # consumes the event
            for _ in range(STOPPED_LOOKS):
                time.sleep(LOOK_S)
                # A second stop means that the process continued in between, which can no longer be seen.
                news = os.WEXITED | os.WCONTINUED | os.WSTOPPED
                if os.waitid(*of_it, news | os.WNOHANG | os.WNOWAIT) is not None:
                    with suppress(ChildProcessError):  # the process has ended
                        os.waitid(*of_it, os.WCONTINUED | os.WNOHANG)
                    break
            else:
                process.kill()

    def _end(self) -> str:
        status = self._status.result()
        return f"ended by signal {-status}" if status < 0 else f"exit status {status}"


def _waited(process: "subprocess.Popen[bytes]") -> "os.waitid_result":
    """Waits until the process is stopped or has ended, and returns this event without consuming it."""
    seen = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    assert seen is not None
    return seen


def _error_of(message: Unbuilt) -> Exception:
    """Returns the exception that was raised, or a RuntimeError if its class is not the engine's own."""
    kind = getattr(errors, message.error, None)
    if message.error == ValueError.__name__:
        kind = ValueError
    return RuntimeError(f"{message.error}: {message.reason}") if kind is None else kind(message.reason)
