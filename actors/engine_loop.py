"""An engine in a thread of its own, and what the event loop may ask of it."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue

from actors.messages import Answer, Close, Leave, Open, Stop, Submit, ToEngine
from outrider.decoding.settings import Sampling
from outrider.engine.blame import reason_of, says_broken
from outrider.engine.engine import Engine
from outrider.engine.errors import EngineError, SequenceFailedError
from outrider.engine.work import Failed, Load, Result, Work

logger = logging.getLogger(__name__)


class EngineStoppedError(Exception):
    """The engine failed: nothing that was open goes on."""


class LeavingError(EngineStoppedError):
    """The worker is drained: what was open goes on elsewhere."""


Letter = Answer | Exception | None  # None is a normal end


class OpenSequence:
    """One sequence as the event loop sees it: work in, answers out."""

    def __init__(self, engine_loop: "EngineLoop", number: int) -> None:
        self._engine_loop = engine_loop
        self.number = number
        self._letters: asyncio.Queue[Letter] = asyncio.Queue()

    def submit(self, round_number: int, work: Work) -> None:
        """Has the engine do it. What it refuses ends the answers with its error."""
        # The engine may be in a step, and the work waits for its end.
        self._engine_loop.tell(Submit(work, round_number, time.perf_counter()))

    def close(self) -> None:
        """Frees what the engine holds for it."""
        self._engine_loop.close(self)

    def put(self, letter: Letter) -> None:
        """The next answer, or what ends them."""
        self._letters.put_nowait(letter)

    async def answers(self) -> AsyncIterator[Answer]:
        """Raises the exception that was put, once what came before it is read."""
        while (letter := await self._letters.get()) is not None:
            if isinstance(letter, Exception):
                raise letter
            yield letter


class EngineLoop:
    """Takes messages in the order in which they came; between them it steps, or sleeps for lack of work.

    Before a step it waits as long as the engine says that company on its way is worth it.
    """

    def __init__(self, build: Callable[[], Engine]) -> None:
        """Returns when the engine is built, in the thread that will drive it; raises what building it raises.

        OpenMP keeps a team of threads for every thread that ever computed, and once those are more than the
        cores it puts them to sleep after each operation: a model loaded elsewhere would slow down every step.
        """
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._messages: SimpleQueue[ToEngine | Callable[[], None]] = SimpleQueue()
        self._numbers = count()
        self._heard: dict[int, OpenSequence] = {}  # by number; for the event loop only
        self._rounds: dict[int, int] = {}  # the newest of each sequence that the engine has open, by number
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
        opened = OpenSequence(self, next(self._numbers))
        self._heard[opened.number] = opened
        self.tell(Open(opened.number, prompt_length, noise_key, sampling))
        return opened

    def close(self, opened: OpenSequence) -> None:
        """Nothing more is put into it."""
        self._heard.pop(opened.number, None)
        self.tell(Close(opened.number))

    @property
    def open_sequences(self) -> int:
        """Working, waiting or between two rounds."""
        return len(self._rounds)

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
        self.tell(Leave())

    def stop(self) -> None:
        """Ends the thread after the step under way, and whatever is open with LeavingError."""
        self.tell(Stop())
        self._thread.join()

    def tell(self, message: ToEngine) -> None:
        self._messages.put(message)

    def command(self, command: Callable[[], None]) -> None:
        """Has it called in the engine's thread."""
        self._messages.put(command)

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
                message = self._next_message()
                if message is None:
                    self._step()
                else:
                    self._guarded(partial(self._take, message))
            except Exception as error:
                logger.exception("the engine failed")
                self.failure = error
                self._end_all(EngineStoppedError(f"the engine failed: {error}"))
        self._end_all(LeavingError("the worker is drained"))
        if self.failure is None:
            self._engine.shut_down()

    def _take(self, message: ToEngine | Callable[[], None]) -> None:
        match message:
            case Open():
                self._open(message)
            case Submit():
                self._submit(message)
            case Close():
                self._close(message.sequence)
            case Leave():
                self._is_leaving = True
                self._end_all(LeavingError("the worker is drained"))
            case Stop():
                self._is_running = False
            case _:
                message()

    def _guarded(self, command: Callable[[], object]) -> None:
        """A command that fails is a defect of ours, and no reason to give up every sequence."""
        try:
            command()
        except Exception as error:
            if says_broken(error):
                raise
            logger.exception("a command to the engine failed")

    def _next_message(self) -> ToEngine | Callable[[], None] | None:
        """None when it is time to step. Waits for one when there is nothing to do, or not yet."""
        if self.failure is not None or not self._engine.has_work:
            return self._messages.get()
        try:
            if not self._messages.empty():
                return self._messages.get_nowait()
            patience = self._engine.patience()
            return self._messages.get(timeout=patience) if patience > 0.0 else None
        except Empty:
            return None

    def _step(self) -> None:
        self._steps += 1
        self.step_under_way = self._steps
        results = self._engine.step()
        self.step_under_way = None
        self._guarded(lambda: self._stepped(results))
        load, now = self._engine.load(), time.time_ns()
        told: list[tuple[int, Letter]] = []
        for result in results:
            if isinstance(result, Failed):
                del self._rounds[result.sequence]
                told.append((result.sequence, SequenceFailedError(result.reason)))
            else:
                answer = Answer(self._rounds[result.sequence], result, load, now)
                told.append((result.sequence, answer))
        self._deliver(told)

    def _open(self, opening: Open) -> None:
        number = opening.sequence
        if self.failure is not None:
            self._deliver([(number, EngineStoppedError(f"the engine failed: {self.failure}"))])
            return
        if self._is_leaving:
            self._deliver([(number, LeavingError("the worker is drained"))])
            return
        try:
            self._engine.open(opening.prompt_length, opening.noise_key, opening.sampling, number)
        except ValueError as error:
            self._deliver([(number, error)])
            return
        except Exception as error:
            logger.exception("a sequence could not be opened")
            self._deliver([(number, SequenceFailedError(reason_of(error)))])
            return
        self._rounds[number] = 0

    def _submit(self, asked: Submit) -> None:
        number = asked.work.sequence
        if number not in self._rounds:
            return  # refused already, or closed
        self._rounds[number] = asked.round
        try:
            self._engine.submit(asked.work, asked.arrived)
        except (ValueError, EngineError) as error:
            self._deliver([(number, error)])
        except Exception as error:
            if says_broken(error):
                raise
            failed = self._engine.fail(self._engine.sequence(number), error)
            del self._rounds[number]
            self._deliver([(number, SequenceFailedError(failed.reason))])

    def _close(self, number: int) -> None:
        if self._rounds.pop(number, None) is not None:
            self._engine.close(self._engine.sequence(number))

    def _end_all(self, error: EngineStoppedError) -> None:
        self._deliver([(number, error) for number in self._rounds])

    def _deliver(self, told: list[tuple[int, Letter]]) -> None:
        """One call into the event loop per step, however many sequences it served."""
        if told:
            assert self._event_loop is not None
            self._event_loop.call_soon_threadsafe(self._put_all, told)

    # On the event loop.

    def _put_all(self, told: list[tuple[int, Letter]]) -> None:
        for number, letter in told:
            if number in self._heard:
                self._heard[number].put(letter)
