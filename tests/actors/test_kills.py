"""Workers are killed under streams of every drafter: each text is the one without Drafts, drafting goes on.

Frontend and engine of each worker are processes of their own, as users have them; rounds are the gateway's.
One service has all the drafters that can be beside each other. A new row of the registry is here by itself.
"""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil  # type: ignore[import-untyped]
import pytest

from gateway.loop.factory import LoopFactory
from gateway.loop.loop import SequenceLoop
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence
from gateway.settings import GatewaySettings, Speculation
from gateway.workers.fleet import Fleet
from gateway.workers.streams import Role, WorkerInfo
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import NoiseScope, Sampling
from outrider.demo.prompts import DEMO
from outrider.drafters.registry import DrafterInfo, Place, drafters
from outrider.pace.settings import PaceSettings
from tests.support.assistant import PROMPTS as GEMMA4_PROMPTS
from tests.support.assistant import pair as gemma4_pair
from tests.support.demo_pair import DRAFTERS, prompt_of
from tests.support.dflash import Form, write_dflash
from tests.support.eagle3 import P_EAGLE, write_eagle3
from tests.support.mtp import write_target
from tests.support.patience import LIMIT_S, eventually
from tests.support.process_worker import worker_process
from tests.support.trust import TRUST

Process = Literal["frontend", "engine"]
BESIDE = [row.name for row in drafters() if row.place is Place.TARGET_WORKER and not row.mixes]
DRAFTS = {
    "model": DEMO / "draft",
    "parallel": DRAFTERS / "parallel",
}  # checkpoints by the name of draft and drafter
TEMPERATURES = (0.0, 0.7, 1.0)
NOISE_SCOPES: tuple[NoiseScope, ...] = ("prompt", "prompt", "seed")  # scopes by temperature
TOKENS = 120
DEPTH = 4
ENGINE = {"dtype": "float32", "device": "cpu", "threads": 1, "cache_memory": 2**26}
OF_RANDOM_TARGET = [tuple((7 * number * place + 3) % 256 for place in range(20)) for number in (1, 2, 3)]
# The demo target has no trained heads of these kinds.
UNTRAINED: dict[str, Callable[[Path], Path]] = {
    "dflash": partial(write_dflash, form=Form(is_shifted=True), kind="DeepSpec"),
    "peagle": partial(write_eagle3, form=P_EAGLE),
}
OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "early_exit": {"layers": 2},  # no search: it drafts at once
    "colocated": {"checkpoint": str(DEMO / "draft")},
}


@dataclass
class Stream:
    """One sequence, as far as it was read."""

    rounds: SequenceLoop
    drafter: DrafterInfo | None
    text: list[int] = field(default_factory=list)

    async def read(self) -> None:
        async for step in self.rounds.steps():
            self.text += [token.id for token in step.tokens]

    @property
    def parts(self) -> tuple[str, ...]:
        """What its Drafts come from. Of a drafter that is mixed it is the first that has a worker."""
        if self.drafter is None:
            return ()
        return (self.drafter.name,) if self.drafter.is_united else self.drafter.mixes or (self.drafter.name,)

    def of_first(self, what: str) -> int:
        """Rounds, or accepted tokens, that the first part has had so far."""
        return self.rounds.stats.drafted_by[self.parts[0]][what]

    @property
    def asks_a_worker(self) -> bool:
        return self.drafter is not None and self.drafter.place is Place.DRAFT_WORKER

    @property
    def is_under_way(self) -> bool:
        return 0 < len(self.text) < TOKENS


class Service:
    """Worker processes, and the gateway's side of them; another takes the place of each that is killed."""

    def __init__(self, ending: ExitStack, settings: GatewaySettings, prompts: list[tuple[int, ...]]) -> None:
        """settings: whose drafters the streams have, one for each temperature."""
        self._ending = ending
        self._settings = settings
        self._prompts = prompts
        beside = settings.target_drafters
        self.rows = [row for row in settings.roster if (row.place is Place.TARGET_WORKER) == bool(beside)]
        self.workers: list[WorkerInfo] = []

    def start(self, role: Role, model: Path, draft: str = "", **settings: Any) -> WorkerInfo:
        """Nobody knows of it yet."""
        made = worker_process(role, model, **ENGINE, **settings)
        return replace(self._ending.enter_context(made), draft=draft, settings=settings)

    def another(self, worker: WorkerInfo) -> WorkerInfo:
        """The same started again."""
        return self.start(worker.role, Path(worker.model), worker.draft, **worker.settings)

    def streams(self, fleet: Fleet, rows: list[DrafterInfo | None]) -> list[Stream]:
        """None: without Drafts."""
        factory = LoopFactory(fleet, Paces(PaceSettings()), self._settings)
        return [self._stream(factory, row, number) for row in rows for number in range(len(TEMPERATURES))]

    def _stream(self, factory: LoopFactory, row: DrafterInfo | None, number: int) -> Stream:
        prompt = self._prompts[number]
        sampling = Sampling(
            max_tokens=TOKENS,
            ignore_eos=True,
            temperature=TEMPERATURES[number],
            noise_scope=NOISE_SCOPES[number],
        )
        sequence = GatewaySequence(prompt, sampling, noise_key(number, 0, prompt))
        asked = Speculation(mode="fixed" if row else "off", depth=DEPTH, drafter=row.name if row else None)
        resolved = asked.resolved(self._settings.usual_drafter, PaceSettings())
        deadline = asyncio.get_running_loop().time() + LIMIT_S
        return Stream(factory.of(sequence, resolved, deadline), row)


@pytest.fixture(scope="module")
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Starts a target with its drafter, or if it has none, a draft worker for each drafter."""
    beside: str | None = request.param
    drafts = {} if beside else {name: name for name in DRAFTS}
    settings = GatewaySettings(
        model="m",
        tokenizer="t",
        drafts=drafts,
        target_drafters=(beside,) if beside else (),
        drafters=(beside,) if beside else tuple(drafts),
        propose_deadline_ms=1e3 * LIMIT_S,
    )
    model, prompts = DEMO / "target", [prompt_of("json", number) for number in range(len(TEMPERATURES))]
    own: dict[str, Any] = {}
    if beside == "mtp":  # the demo target has no such layer
        model, prompts = write_target(tmp_path_factory.mktemp("mtp"), "qwen3"), OF_RANDOM_TARGET
        own = {"drafters": {beside: {}}}
    elif beside == "assistant":
        model, assistant = gemma4_pair().write(tmp_path_factory.mktemp("gemma4"))
        prompts, own = GEMMA4_PROMPTS, {"drafters": {beside: {"checkpoint": str(assistant)}}}
    elif beside:
        folder = (
            UNTRAINED[beside](tmp_path_factory.mktemp(beside)) if beside in UNTRAINED else DRAFTERS / beside
        )
        settings_of_it = {"checkpoint": str(folder), **OTHER_SETTINGS.get(beside, {})}
        own = {"drafters": {beside: settings_of_it}}
    with ExitStack() as ending:
        service = Service(ending, settings, prompts)
        service.workers.append(service.start("target", model, **own))
        for name, folder in {} if beside else DRAFTS.items():
            service.workers.append(service.start("draft", folder, name))
        yield service


def has_ended(pid: int) -> bool:
    multiprocessing.active_children()  # children that have ended are not kept as zombies
    return not psutil.pid_exists(pid)


async def killed(service: Service, role: Role, process: Process) -> None:
    """All workers of that role are, while every stream has had Drafts and none is at its end."""
    lost = [worker for worker in service.workers if worker.role == role]
    others = [await asyncio.to_thread(service.another, worker) for worker in lost]
    fleet = Fleet(lambda: service.workers, TRUST)
    try:
        plain = service.streams(fleet, [None])
        await asyncio.gather(*(stream.read() for stream in plain))
        streams = service.streams(fleet, [*service.rows])
        reading = asyncio.gather(*(stream.read() for stream in streams))
        await eventually(lambda: reading.done() or all(stream.of_first("accepted") > 0 for stream in streams))
        assert all(stream.is_under_way for stream in streams)
        before = [stream.of_first("rounds") for stream in streams]
        service.workers += others
        for worker in lost:
            os.kill(worker.pid if process == "frontend" else worker.ranks[0], signal.SIGKILL)
        await reading
    finally:
        await fleet.close()
    assert [stream.text for stream in streams] == len(service.rows) * [stream.text for stream in plain]
    for stream, rounds in zip(streams, before, strict=True):
        stats = stream.rounds.stats
        assert stream.of_first("rounds") > rounds
        # A sequence may move to the other target, since its own is late, before the loss is noticed.
        assert stats.lost_targets + stats.moves == (role == "target")
        assert (stats.lost_drafts > 0) == (role == "draft" and stream.asks_a_worker)
        assert {*stats.drafted_by} <= {*stream.parts}
    pids = [pid for worker in lost for pid in (worker.pid, *worker.ranks)]
    await eventually(lambda: all(map(has_ended, pids)))  # neither process outlives the other
    service.workers = [worker for worker in service.workers if worker not in lost]


SERVICES = [pytest.param(name, marks=[pytest.mark.slow] * (name != "mtp")) for name in (None, *BESIDE)]
PROCESSES = [pytest.param("frontend", marks=pytest.mark.slow), "engine"]  # one process in the quick suite


@pytest.mark.parametrize("service", SERVICES, indirect=True, ids=lambda name: name or "others")
@pytest.mark.parametrize("process", PROCESSES)
async def test_targets_are_killed_under_streams_of_every_drafter(service: Service, process: Process) -> None:
    await killed(service, "target", process)


@pytest.mark.slow
@pytest.mark.parametrize("service", [None], indirect=True, ids=["others"])
@pytest.mark.parametrize("process", ["frontend", "engine"])
async def test_draft_workers_are_killed_and_whoever_asks_none_notices_nothing(
    service: Service, process: Process
) -> None:
    await killed(service, "draft", process)
