"""The same text whatever drafts, alone and in company: 500 seeded requests for every drafter that there is.

Real engines of the demo pair behind real gRPC, and the gateway's own rounds. A new row of the registry
is here by itself.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import gateway.loop.factory
from gateway.loop.factory import LoopFactory
from gateway.loop.stats import Stats
from gateway.roster import BY_TASK, INDICES
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence
from gateway.settings import GatewaySettings, Speculation
from gateway.workers.fleet import Fleet
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import NoiseScope, Sampling
from outrider.demo.prompts import DEMO, KINDS
from outrider.drafters.past_answers import Scope
from outrider.drafters.registry import DrafterInfo, Place, drafters, mixed
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.pace.settings import PaceSettings
from tests.support.demo_pair import DRAFTERS, engine, prompt_of
from tests.support.dflash import Form, write_dflash
from tests.support.eagle3 import P_EAGLE, write_eagle3
from tests.support.near_ties import near_ties
from tests.support.pair import pair
from tests.support.patience import LIMIT_S

COUNT, TOKENS = 500, 10
TEMPERATURES = (0.0, 0.7, 1.0)
SCOPES: tuple[NoiseScope, ...] = ("prompt", "seed")
DEPTH = 4
OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "early_exit": {"layers": 2},  # no search: it drafts at once
    "colocated": {"checkpoint": str(DEMO / "draft")},
}
NO_CHECKPOINT = {"assistant", "mtp"}  # for the demo target: tests/engine/drafters/ has them on random ones
ROWS = [
    *(row for row in drafters() if row.name not in NO_CHECKPOINT),
    mixed("eagle3", *INDICES),
    mixed("eagle3", "prediction", *INDICES),
]


@cache
def requests() -> list[OfflineRequest]:
    """Kinds of text take turns, then temperatures, then scopes of the noise; all seeds differ."""
    made = []
    for number in range(COUNT):
        turn, kind = divmod(number, len(KINDS))
        prompt = prompt_of(KINDS[kind], number % 48)
        turn, heat = divmod(turn, len(TEMPERATURES))
        scope = SCOPES[turn % len(SCOPES)]
        sampling = Sampling(max_tokens=TOKENS, temperature=TEMPERATURES[heat], seed=number, noise_scope=scope)
        key = noise_key(number, 0, prompt if scope == "prompt" else ())
        made.append(OfflineRequest(prompt, sampling, key))
    return made


@cache
def expected() -> list[tuple[int, ...]]:
    """Plainly by the engine, each alone."""
    return [generate(engine("target"), None, [request], 0)[0].tokens for request in requests()]


def predicted(number: int) -> tuple[int, ...]:
    """Returns the answer to a request, with an edit in its middle."""
    answer = expected()[number]
    return (*answer[: TOKENS // 2], 1, 2, *answer[TOKENS // 2 + 1 :])


def checkpoint_of(kind: str, folder: Path) -> Path:
    """Returns a checkpoint of a target drafter for the demo target."""
    if kind == "peagle":
        return write_eagle3(folder, P_EAGLE)
    return write_dflash(folder, Form(is_shifted=True), "DeepSpec") if kind == "dflash" else DRAFTERS / kind


@asynccontextmanager
async def service(
    row: DrafterInfo | None, folder: Path
) -> AsyncIterator[tuple[Fleet, GatewaySettings, Speculation]]:
    """Where that drafter drafts; without one decoding is plain."""
    usual = {"model": "m", "tokenizer": "t", "propose_deadline_ms": 1e3 * LIMIT_S}
    target: dict[str, Any] = {}
    draft: dict[str, Any] = {}
    name = row.name if row else None
    if row is not None and "prediction" in (row.name, *(row.mixes or ())):
        name = BY_TASK  # a request brings it along
    if row is not None and row.place is Place.TARGET_WORKER:
        kind = row.asked
        own = {"checkpoint": str(checkpoint_of(kind, folder)), **OTHER_SETTINGS.get(kind, {})}
        target = {"drafters": {kind: own}}
        usual |= {"target_drafters": (kind,), "drafts": {}, "drafters": (kind,)}
    elif row is not None and row.place is Place.DRAFT_WORKER:
        kind, _, index = row.name.partition("+")
        draft = {} if kind == "model" else {"model": str(DRAFTERS / kind)}
        usual |= {"drafts": {"model": kind}}  # the draft is named model, however it drafts
        name = f"model+{index}" if index else "model"
    speculation = Speculation(mode="fixed" if row else "off", depth=DEPTH, drafter=name)
    async with pair(12, of_draft=draft, **target) as fleet:
        yield fleet, GatewaySettings.model_validate(usual), speculation


async def answers(
    fleet: Fleet, settings: GatewaySettings, speculation: Speculation, streams: int
) -> tuple[list[tuple[int, ...]], Stats]:
    """So many at a time, and what was done for them."""
    factory, stats = LoopFactory(fleet, Paces(PaceSettings()), settings), Stats()
    resolved = speculation.resolved(settings.usual_drafter, PaceSettings())
    found: list[tuple[int, ...]] = [()] * COUNT
    coming = iter(enumerate(requests()))

    async def stream() -> None:
        for number, request in coming:
            scope = Scope("somebody", KINDS[number % len(KINDS)])
            sequence = GatewaySequence(
                request.prompt,
                request.sampling,
                request.noise_key,
                scope=scope,
                prediction=predicted(number) if speculation.drafter == BY_TASK else (),
            )
            deadline = asyncio.get_running_loop().time() + LIMIT_S
            rounds = factory.of(sequence, resolved, deadline, scope.task)
            async for _ in rounds.steps():
                pass
            found[number] = tuple(sequence.generated)
            stats.add(rounds.stats)

    await asyncio.gather(*(stream() for _ in range(streams)))
    return found, stats


@pytest.mark.slow
@pytest.mark.parametrize("streams", [1, 32])
@pytest.mark.parametrize("row", [None, *ROWS], ids=lambda row: row.name if row else "off")
async def test_500_seeded_requests_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: DrafterInfo | None, streams: int
) -> None:
    monkeypatch.setattr(gateway.loop.factory, "_with_prediction", lambda rows: [row])
    async with service(row, tmp_path) as (fleet, settings, speculation):
        found, stats = await answers(fleet, settings, speculation, streams)
    assert (stats.accepted > COUNT // 10) == (row is not None)
    if row is not None and row.is_united:
        assert row.name in stats.drafted_by
    assert near_ties(requests(), expected(), found) <= 1
    assert len({*expected()}) > COUNT // 2  # the texts are not all alike
