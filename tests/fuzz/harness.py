"""A service under batches of calls, with eight reference streams, and its health after each batch."""

import asyncio
import gc
import json
import logging
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol, Self

from tests.fuzz.calls import STAYS, Exchange, HttpCall
from tests.support.patience import eventually
from tests.support.service import Service, service_of

BATCH_S = 60.0  # in which a batch ends on a slow machine too
LAST_S = 5.0  # in which tasks end once nothing is open any more
SETTINGS: dict[str, Any] = {
    "target": {"cache_memory": 2**24},  # few enough blocks for refusals and preemption
    "gateway": {"max_output_tokens": 48, "max_prompt_tokens": 1024, "request_deadline_s": 30.0},
}
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"

# gRPC has one poller for all event loops of a process: some of it may be for the loop of an earlier test.
CLOSED = "Event loop is closed"


class Call(Protocol):
    async def run(self, service: Service) -> str:
        """How it ended. Raises AssertionError for what must not happen."""


def _reference(path: str = COMPLETIONS, **fields: Any) -> HttpCall:
    return HttpCall(path, {"seed": 11, "max_tokens": 12, **fields})


# In every mode, by several drafters; all of them are coupled, so speculation cannot change their text.
REFERENCES = [
    _reference(prompt="def main(", temperature=0.0, speculation={"mode": "off"}),
    _reference(prompt="class History:\n", speculation={"mode": "off"}, n=2),
    _reference(prompt="class History:\n", speculation={"mode": "fixed", "depth": 4}, stream=True),
    _reference(
        prompt="The cat sat on", temperature=0.7, top_p=0.9, speculation={"mode": "fixed", "depth": 9}
    ),
    _reference(prompt="a b a b a b a b", speculation={"mode": "fixed", "drafter": "ngram", "depth": 3}),
    _reference(
        prompt='{"name": "', repetition_penalty=1.2, speculation={"drafter": "ngram"}, priority="batch"
    ),
    _reference(
        prompt="to be or not to be or", speculation={"mode": "fixed", "drafter": "suffix", "depth": 5}
    ),
    _reference(prompt="a b c d a b c d a b", speculation={"mode": "fixed", "drafter": "model+suffix"}),
    _reference(prompt=[7, 8, 9, 10, 11, 12], frequency_penalty=0.5, logprobs=3, n=2, stream=True),
    _reference(CHAT, messages=[{"role": "user", "content": "Tell me."}], min_tokens=7, top_k=40),
]


class Harness:
    """Runs batches from code that is not asynchronous. A service in which something broke is built anew."""

    def __init__(self, **settings: Any) -> None:
        self._settings = SETTINGS | settings
        self._runner = asyncio.Runner()
        self._ending = AsyncExitStack()
        self._service: Service | None = None
        self._texts: list[Any] = []  # texts of the references, asked for alone
        self._tasks: Counter[str] = Counter()  # tasks of a service at rest
        self._unheard: list[str] = []  # exceptions of tasks that were not awaited
        self.ended: Counter[str] = Counter()  # how all calls did

    def __enter__(self) -> Self:
        logging.getLogger("grpc").setLevel(logging.CRITICAL)
        return self

    def __exit__(self, *raised: object) -> None:
        self._runner.run(self._ending.aclose())
        self._runner.close()

    def run(self, calls: Sequence[Call]) -> None:
        """Makes all calls at once. Raises AssertionError if a call or, after them, the service fails."""
        try:
            self._runner.run(self._run(calls))
        except BaseException:
            self._runner.run(self._give_up())
            raise

    async def _run(self, calls: Sequence[Call]) -> None:
        service = self._service or await self._start()
        async with asyncio.timeout(BATCH_S):
            running = asyncio.gather(*(self._judged(call, service) for call in calls))
            while True:
                said = await asyncio.gather(*(_said(call, service) for call in REFERENCES))
                for call, text, told in zip(REFERENCES, self._texts, said, strict=True):
                    assert text == told, f"{call} said {told}, undisturbed {text}"
                if running.done():
                    break
        faults = [fault for fault in await running if fault is not None]
        assert not faults, "\n\n".join(faults)
        await self._check(service)

    async def _judged(self, call: Call, service: Service) -> str | None:
        try:
            self.ended[await call.run(service)] += 1
        except Exception as error:
            told = str(error) if error.__cause__ is None else "".join(traceback.format_exception(error))
            return f"{str(call)[:2000]}\n{told or repr(error)}"
        return None

    async def _check(self, service: Service) -> None:
        for worker in service.workers:
            failure = worker.behind.failure
            assert failure is None, f"the engine of a {worker.role} failed: {failure!r}"
        try:
            await service.quiet()
        except TimeoutError as error:
            held = [
                (worker.role, worker.client.open_sequences, await worker.client.report())
                for worker in service.workers
            ]
            gc.collect()
            await asyncio.sleep(0.1)
            until = (
                "the garbage collector runs" if all([await w.is_idle() for w in service.workers]) else "ever"
            )
            raise AssertionError(f"held until {until} (role, open sequences, load): {held}") from error
        try:
            await eventually(lambda: not _tasks() - self._tasks, LAST_S)
        except TimeoutError as error:
            raise AssertionError(f"tasks that nobody ended: {_tasks() - self._tasks}") from error
        assert not self._unheard, "\n".join(self._unheard)

    async def _start(self) -> Service:
        asyncio.get_running_loop().set_exception_handler(self._hear)
        service = await self._ending.enter_async_context(service_of(**self._settings))
        self._texts = [await _said(call, service) for call in REFERENCES]
        await service.quiet()
        self._tasks = _tasks()
        self._service = service
        return service

    async def _give_up(self) -> None:
        """What is left of it is not worth a second failure."""
        self._service, ending, self._ending = None, self._ending, AsyncExitStack()
        try:
            async with asyncio.timeout(10):
                await ending.aclose()
        except Exception:
            logging.exception("the service could not be ended")
        self._unheard.clear()

    def _hear(self, loop: asyncio.AbstractEventLoop, told: Mapping[str, Any]) -> None:
        if CLOSED not in repr(told.get("exception")):
            self._unheard.append(f"{told.get('message')}: {told.get('exception')!r}")


def _tasks() -> Counter[str]:
    """All but this one and those of gRPC itself: it waits for calls, and for the end of cancelled ones.

    By what they run: a connection that broke, as on a busy machine, has a successor.
    """
    others = asyncio.all_tasks() - {asyncio.current_task()}
    names = [_name(task.get_coro()) for task in others]
    return Counter(name for name in names if not name.startswith(("AioServer.", "_AioCall.")))


def _name(coroutine: Any) -> str:
    return coroutine.__qualname__


async def _said(call: HttpCall, service: Service) -> dict[int, str]:
    """The text of each choice."""
    answer = await Exchange("POST", call.path, json.dumps(call.body).encode(), STAYS).run(service.app)
    assert answer is not None
    status, content = answer
    assert status == 200, f"{call}: {status} {content!r}"
    bodies = [content.decode()]
    if call.body.get("stream"):
        bodies = [event.removeprefix("data: ") for event in content.decode().split("\n\n")[:-2]]
    texts: dict[int, str] = {}
    for choice in (choice for body in bodies for choice in json.loads(body)["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + (
            choice["text"] if "text" in choice else choice["message"]["content"]
        )
    return texts
