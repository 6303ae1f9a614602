"""Runs an engine in a process of its own, driven by messages of its worker's frontend."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from actors.connection import Connection
from actors.messages import (
    AdapterLoaded,
    AskReport,
    Close,
    DropAdapter,
    EngineReport,
    FromEngine,
    LoadAdapter,
    Open,
    RefusalKind,
    Refused,
    Stepped,
    Stop,
    Submit,
    ToEngine,
)
from outrider.decoding.grammar import GrammarError
from outrider.engine.blame import reason_of, says_broken
from outrider.engine.errors import EngineError, UnsupportedModelError
from outrider.engine.loop.engine import Engine
from outrider.engine.step_timings import StepTimings
from outrider.engine.work import AskedAdapter, Failed, Result

logger = logging.getLogger(__name__)


class EngineLoop:
    """Loop that handles messages in order, and steps the engine between them; it blocks without work.

    Before a step it waits for more sequences, for at most ``Engine.patience`` seconds.
    """

    def __init__(self, engine: Engine, connection: Connection[ToEngine]) -> None:
        """engine: engine that was built in this thread.

        OpenMP keeps a thread pool for every thread that ever computed. If the pools have more threads than
        there are cores, it puts threads to sleep after each operation. So a model that was loaded in another
        thread would slow down every step.
        """
        self._engine = engine
        self._connection = connection
        self._rounds: dict[int, int] = {}  # newest round of each open sequence, by its number
        self._unsent: list[FromEngine] = []
        self._is_running = True
        self._newest = engine.last_step  # newest step that was recorded, or taken before the loop began
        self._steps: list[StepTimings] = []  # steps that were not reported to the frontend yet
        self.step_under_way: int | None = None  # number of the current step or load; None between them
        self._count = 0  # number of steps so far, and of loads with the time limit of a step

    def run(self) -> None:
        """Runs until the frontend stops it or disconnects. Raises the error of a broken engine."""
        try:
            while self._is_running:
                # Without work it blocks until a message arrives.
                patience = self._engine.patience() if self._engine.has_work else None
                messages = self._connection.receive(patience)
                for message in messages:
                    self._guarded_take(message)
                if self._engine.has_work and not messages:
                    self._step()
                if self._unsent:
                    self._connection.send(*self._unsent)
                    self._unsent.clear()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            logger.warning("the frontend of this worker is gone")
        self._engine.shut_down()

    def _guarded_take(self, message: ToEngine) -> None:
        """Handles a message. A failure is a defect of this code, and must not end every sequence."""
        try:
            self._take(message)
        except Exception as error:
            if says_broken(error):
                raise
            logger.exception("a message to the engine failed")

    def _take(self, message: ToEngine) -> None:
        match message:
            case Open():
                self._open(message)
            case Submit():
                self._submit(message)
            case Close():
                self._close(message.sequence)
            case LoadAdapter():
                self._load(message.adapter)
            case DropAdapter():
                self._engine.drop_adapter(message.digest)
            case AskReport():
                self._tell_of_step([])
                self._unsent.append(EngineReport(self._engine.load(), self._engine.runner.free_memory()))
            case Stop():
                self._is_running = False
            case _:
                raise ValueError(f"{type(message).__name__} is no message to an engine that runs")

    def _step(self) -> None:
        with self._limited():
            results = self._engine.step(self._connection.has_come)
        step = self._engine.last_step
        if step is not None and step is not self._newest:  # results may come without a step
            self._newest = step
            self._steps.append(step)
        if results:
            self._tell_of_step(results)

    def _tell_of_step(self, results: Sequence[Result]) -> None:
        rounds = tuple(self._round_of(result) for result in results)
        load, steps = self._engine.load(), tuple(self._steps)
        self._unsent.append(Stepped(tuple(results), rounds, load, time.time_ns(), steps))
        self._steps.clear()

    def _round_of(self, result: Result) -> int:
        if isinstance(result, Failed):
            del self._rounds[result.sequence]
            return 0
        return self._rounds[result.sequence]

    def _load(self, adapter: AskedAdapter) -> None:
        digest, refusal = b"", ""
        try:
            with self._limited():
                digest = self._engine.load_adapter(adapter)
        except Exception as error:
            if says_broken(error):
                raise
            logger.exception("adapter %r is not loaded", adapter.name)
            refusal = str(error)
        self._unsent.append(AdapterLoaded(digest, refusal))

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Applies the time limit of a step to a block of code in which other ranks take part."""
        self._count += 1
        self.step_under_way = self._count
        try:
            yield
        finally:
            self.step_under_way = None

    def _open(self, opening: Open) -> None:
        number = opening.sequence
        try:
            with self._limited():  # opening may load an adapter
                self._engine.open(
                    opening.prompt_length,
                    opening.noise_key,
                    opening.sampling,
                    number,
                    opening.adapter,
                    opening.texts,
                )
        except UnsupportedModelError as error:
            self._unsent.append(Refused(number, "adapter", str(error)))
        except GrammarError as error:
            self._unsent.append(Refused(number, "grammar", str(error)))
        except ValueError as error:
            self._unsent.append(Refused(number, "invalid", str(error)))
        except Exception as error:
            logger.exception("a sequence could not be opened")
            self._unsent.append(Refused(number, "failed", reason_of(error)))
        else:
            self._rounds[number] = 0

    def _submit(self, asked: Submit) -> None:
        number = asked.work.sequence
        if number not in self._rounds:
            return  # the sequence was refused or closed already
        self._rounds[number] = asked.round
        try:
            self._engine.submit(asked.work, asked.arrived)
        except (ValueError, EngineError) as error:
            self._close(number)
            kind: RefusalKind = "invalid" if isinstance(error, ValueError) else "too large"
            self._unsent.append(Refused(number, kind, str(error)))
        except Exception as error:
            if says_broken(error):
                raise
            failed = self._engine.fail(self._engine.sequence(number), error)
            del self._rounds[number]
            self._unsent.append(Refused(number, "failed", failed.reason))

    def _close(self, number: int) -> None:
        if self._rounds.pop(number, None) is not None:
            self._engine.close(self._engine.sequence(number))
