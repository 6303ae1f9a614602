"""An engine in a thread of its own, and what the event loop may ask of it."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from outrider.decoding.settings import Sampling
from outrider.engine.blame import reason_of, says_broken
from outrider.engine.engine import Engine
from outrider.engine.errors import EngineError, SequenceFailedError
from outrider.engine.sequence import Sequence
from outrider.engine.work import Answered, Failed, Load, Result, Work

logger = logging.getLogger(__name__)


class EngineStoppedError(Exception):
    """The engine failed: nothing that was open goes on."""


class LeavingError(EngineStoppedError):
    """The worker is drained: what was open goes on elsewhere."""


@dataclass(frozen=True)
class Answer:
    """A result, the round that asked for it, and how busy the engine was after the step."""

    round: int
    result: Answered
    load: Load
    finished_ns: int  # by time.time_ns


Letter = Answer | Exception | None  # None is a normal end


class OpenSequence:
    """One sequence as the event loop sees it: work in, answers out."""

    def __init__(self, engine_loop: "EngineLoop") -> None:
        self._engine_loop = engine_loop
        self._letters: asyncio.Queue[Letter] = asyncio.Queue()
        self.sequence: Sequence | None = None  # for the engine's thread only, as is the round
        self.round = 0

    def submit(self, round_number: int, work: Callable[[Sequence], Work]) -> None:
        """Has the engine do it. What it refuses ends the answers with its error."""
        arrived = time.perf_counter()  # the engine may be in a step, and the work waits for its end
        self._engine_loop.command(lambda: self._engine_loop.submit(self, round_number, work, arrived))

    def close(self) -> None:
        """Frees what the engine holds for it."""
        self._engine_loop.command(lambda: self._engine_loop.close(self))

    def put(self, letter: Letter) -> None:
        """On the event loop: the next answer, or what ends them."""
        self._letters.put_nowait(letter)

    async def answers(self) -> AsyncIterator[Answer]:
        """Raises the exception that was put, once what came before it is read."""
        while (letter := await self._letters.get()) is not None:
            if isinstance(letter, Exception):
                raise letter
            yield letter


class EngineLoop:
    """Runs commands in the order in which they came; between them it steps, or sleeps for lack of work.

    Before a step it waits as long as the engine says that company on its way is worth it.
    """

    def __init__(self, build: Callable[[], Engine]) -> None:
        """Returns when the engine is built, in the thread that will drive it; raises what building it raises.

        OpenMP keeps a team of threads for every thread that ever computed, and once those are more than the
        cores it puts them to sleep after each operation: a model loaded elsewhere would slow down every step.
        """
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._opened: dict[int, OpenSequence] = {}  # by the engine's number of the sequence
        self._is_running = True
        self._is_leaving = False
        self._stepped: Callable[[list[Result]], None] = lambda results: None
        self.failure: Exception | None = None
        self.step_under_way: int | None = None  # its number
        self._steps = 0
        built: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, built), name="engine", daemon=True)
        self._thread.start()
        self.engine = built.result()

    def attach(self, event_loop: asyncio.AbstractEventLoop) -> None:
        """Says where answers go: before the first sequence is opened."""
        self._event_loop = event_loop

    def after_each_step(self, stepped: Callable[[list[Result]], None]) -> None:
        """Has it called in the engine's thread, with what the step completed."""
        self.command(lambda: setattr(self, "_stepped", stepped))

    def open(self, prompt_length: int, noise_key: int, sampling: Sampling) -> OpenSequence:
        opened = OpenSequence(self)
        self.command(lambda: self._open(opened, prompt_length, noise_key, sampling))
        return opened

    @property
    def open_sequences(self) -> int:
        """Working, waiting or between two rounds."""
        return len(self._opened)

    async def load(self) -> Load:
        """How busy the engine is, once it is done with what came before the question."""
        load: Future[Load] = Future()

        def answer() -> None:
            if load.set_running_or_notify_cancel():  # whoever asked may have given up
                load.set_result(self._engine.load())

        self.command(answer)
        return await asyncio.wrap_future(load)

    def leave(self) -> None:
        """Ends whatever is open with LeavingError, and what comes later too."""
        self.command(self._leave)

    def stop(self) -> None:
        """Ends the thread after the step under way, and whatever is open with LeavingError."""
        self.command(lambda: setattr(self, "_is_running", False))
        self._thread.join()

    def command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)

    # What follows runs in the engine's thread.

    def _run(self, build: Callable[[], Engine], built: "Future[Engine]") -> None:
        try:
            self._engine = build()
        except BaseException as error:
            built.set_exception(error)
            return
        built.set_result(self._engine)
        while self._is_running:
            try:
                command = self._next_command()
                if command is None:
                    self._step()
                else:
                    self._obey(command)
            except Exception as error:
                logger.exception("the engine failed")
                self.failure = error
                self._end_all(EngineStoppedError(f"the engine failed: {error}"))
        self._end_all(LeavingError("the worker is drained"))
        if self.failure is None:
            self._engine.shut_down()

    def _obey(self, command: Callable[[], object]) -> None:
        """A command that fails is a defect of ours, and no reason to give up every sequence."""
        try:
            command()
        except Exception as error:
            if says_broken(error):
                raise
            logger.exception("a command to the engine failed")

    def _next_command(self) -> Callable[[], None] | None:
        """None when it is time to step. Waits for a command when there is nothing to do, or not yet."""
        if self.failure is not None or not self._engine.has_work:
            return self._commands.get()
        try:
            if not self._commands.empty():
                return self._commands.get_nowait()
            patience = self._engine.patience()
            return self._commands.get(timeout=patience) if patience > 0.0 else None
        except Empty:
            return None

    def _step(self) -> None:
        self._steps += 1
        self.step_under_way = self._steps
        results = self._engine.step()
        self.step_under_way = None
        self._obey(lambda: self._stepped(results))
        load, now = self._engine.load(), time.time_ns()
        letters: list[tuple[OpenSequence, Letter]] = []
        for result in results:
            if isinstance(result, Failed):
                letters.append(self._failed(result))
                continue
            opened = self._opened[result.sequence.number]
            letters.append((opened, Answer(opened.round, result, load, now)))
        self._deliver(letters)

    def _failed(self, result: Failed) -> tuple[OpenSequence, Letter]:
        opened = self._opened.pop(result.sequence.number)
        opened.sequence = None
        return opened, SequenceFailedError(result.reason)

    def _open(self, opened: OpenSequence, prompt_length: int, noise_key: int, sampling: Sampling) -> None:
        if self.failure is not None:
            self._deliver([(opened, EngineStoppedError(f"the engine failed: {self.failure}"))])
            return
        if self._is_leaving:
            self._deliver([(opened, LeavingError("the worker is drained"))])
            return
        try:
            opened.sequence = self._engine.open(prompt_length, noise_key, sampling)
        except ValueError as error:
            self._deliver([(opened, error)])
            return
        except Exception as error:
            logger.exception("a sequence could not be opened")
            self._deliver([(opened, SequenceFailedError(reason_of(error)))])
            return
        self._opened[opened.sequence.number] = opened

    def submit(
        self, opened: OpenSequence, round_number: int, work: Callable[[Sequence], Work], arrived: float
    ) -> None:
        if opened.sequence is None:
            return  # refused already, or closed
        opened.round = round_number
        try:
            self._engine.submit(work(opened.sequence), arrived)
        except (ValueError, EngineError) as error:
            self._deliver([(opened, error)])
        except Exception as error:
            if says_broken(error):
                raise
            self._deliver([self._failed(self._engine.fail(opened.sequence, error))])

    def close(self, opened: OpenSequence) -> None:
        if opened.sequence is not None:
            self._engine.close(opened.sequence)
            del self._opened[opened.sequence.number]
            opened.sequence = None

    def _leave(self) -> None:
        self._is_leaving = True
        self._end_all(LeavingError("the worker is drained"))

    def _end_all(self, error: EngineStoppedError) -> None:
        self._deliver([(opened, error) for opened in self._opened.values()])

    def _deliver(self, letters: list[tuple[OpenSequence, Letter]]) -> None:
        """One call into the event loop per step, however many sequences it served."""
        if letters:
            assert self._event_loop is not None
            self._event_loop.call_soon_threadsafe(_put_all, letters)


def _put_all(letters: list[tuple[OpenSequence, Letter]]) -> None:
    for opened, letter in letters:
        opened.put(letter)
