"""The simulated target's host, and steps that are launched early."""

import asyncio
from functools import partial
from typing import Any

import pytest

from bench import virtual
from bench.simulate import FAR_AHEAD_S, HOP_S, MODES, PAIRS, SETTINGS, Load, closed_loop, fixed
from bench.simulated import Ahead, SimulatedDraft, rank_at, simulated_fleet
from bench.simulated_runner import RIGHT, Host, Launching
from gateway.loop.factory import LoopFactory
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence
from gateway.settings import Speculation
from outrider.decoding.settings import Sampling
from outrider.pace.settings import PaceSettings
from outrider.pace.step import StepSize

LAUNCH_S, PROCESS_S = 0.4e-3, 0.2e-3
SEQUENCE_S = 10e-3  # of a step of the target, for each sequence: taken together nothing is gained
PASS_S = 2e-3  # of the draft: a Draft is there before the other stream's step is over
DEPTH, TOKENS = 4, 200
LONG_S = 60.0  # of the simulator's time, for answers that take a few seconds of it


def host(launching: Launching) -> Host:
    return Host(launch_s=LAUNCH_S, process_s=PROCESS_S, launching=launching)


async def answers(
    fleet: Any, speculation: Speculation, numbers: range, apart_s: float = 0.0
) -> list[GatewaySequence]:
    """So many at a time, which begin one after the other."""
    paces = Paces(PaceSettings())
    resolved = speculation.resolved("model", paces.settings)

    async def answer(number: int) -> GatewaySequence:
        await asyncio.sleep(number * apart_s)
        sequence = GatewaySequence((0,) * 100, Sampling(max_tokens=TOKENS), noise_key=number)
        async for _ in LoopFactory(fleet, paces, SETTINGS).of(sequence, resolved, FAR_AHEAD_S).steps():
            pass
        return sequence

    return await asyncio.gather(*map(answer, numbers))


def seconds_by_turns(launching: Launching) -> float:
    """Two streams: one is at the target while the other's Draft is made."""

    async def measured() -> float:
        draft = SimulatedDraft(lambda size: PASS_S, partial(rank_at, 1.0, 0.0))

        def target(size: StepSize) -> float:
            return size.sequences * SEQUENCE_S

        async with simulated_fleet(target, {"model": draft}, HOP_S, host=host(launching)) as fleet:
            begun = asyncio.get_running_loop().time()
            await answers(fleet, fixed(DEPTH), range(2), apart_s=SEQUENCE_S / 2)
            return asyncio.get_running_loop().time() - begun

    return virtual.run(measured())


def test_the_host_takes_its_time_for_each_step() -> None:
    target, _ = pair = PAIRS["1B in 4 bit on an L4"]
    load = Load(streams=1, prompt_tokens=64, answer_tokens=64, warm_s=2.0, counted_s=4.0)
    counted = virtual.run(closed_loop(pair, {"code": 0.7}, MODES["plain"], load, host=host(Launching.LATE)))
    step_s = target.seconds(StepSize(1, 1, context_tokens=100)) + LAUNCH_S + PROCESS_S
    assert counted.rate(load) == pytest.approx(1 / step_s, rel=0.02)


@pytest.mark.parametrize(
    ("launching", "saved_s"),
    [
        (Launching.AT_ITS_END, PROCESS_S),
        (Launching.FORESEEN, LAUNCH_S + PROCESS_S),
        (Launching.COMPLETE, LAUNCH_S + PROCESS_S),
    ],
)
def test_streams_by_turns_save_what_is_done_meanwhile(launching: Launching, saved_s: float) -> None:
    steps = 2 * TOKENS / (DEPTH + 1)
    saved = seconds_by_turns(Launching.LATE) - seconds_by_turns(launching)
    assert saved == pytest.approx(steps * saved_s, rel=0.03)


@pytest.mark.parametrize("launching", Launching)
@pytest.mark.parametrize("mode", ["fixed 4", "pace"])
def test_answers_are_complete(launching: Launching, mode: str) -> None:
    async def answered() -> list[GatewaySequence]:
        target, draft = PAIRS["1B in 4 bit on an L4"]
        drafts = {"model": SimulatedDraft(draft.seconds, partial(rank_at, 0.7, 0.5), Ahead(12, 0.5))}
        async with (
            asyncio.timeout(LONG_S),
            simulated_fleet(target.seconds, drafts, HOP_S, host=host(launching)) as fleet,
        ):
            return await answers(fleet, MODES[mode], range(4), apart_s=7e-3)

    for sequence in virtual.run(answered()):
        assert sequence.generated == [RIGHT] * TOKENS
