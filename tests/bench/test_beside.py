"""A head beside the simulated target: what it costs by the registry's law, and answers that are complete."""

import asyncio
from functools import partial

import pytest

from bench import virtual
from bench.beside import HEAD
from bench.simulate import FAR_AHEAD_S, HOP_S, SETTINGS, fixed
from bench.simulated import rank_at, simulated_fleet
from bench.simulated_head import SimulatedHead
from bench.simulated_runner import RIGHT
from gateway.loop.factory import LoopFactory
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence
from gateway.settings import Speculation
from outrider.decoding.settings import Sampling
from outrider.pace.settings import PaceSettings
from outrider.pace.step import StepSize

STEP_S, PASS_S = 15e-3, 1.5e-3
TOKENS = 400
BESIDE = SETTINGS.model_copy(update={"drafts": {}, "drafters": ("eagle3",), "beside_target": "eagle3"})


def seconds(acceptance: float, speculation: Speculation) -> float:
    """Of an answer from its first token on."""

    async def answered() -> float:
        head = SimulatedHead(lambda size: PASS_S, partial(rank_at, acceptance, 0.0))
        sequence = GatewaySequence((0,) * 100, Sampling(max_tokens=TOKENS), noise_key=1)
        loop = asyncio.get_running_loop()
        async with simulated_fleet(lambda size: STEP_S, {}, HOP_S, head) as fleet:
            rounds = LoopFactory(fleet, Paces(PaceSettings()), BESIDE).of(sequence, speculation, FAR_AHEAD_S)
            times = [loop.time() async for _ in rounds.steps()]
        assert sequence.generated == [RIGHT] * TOKENS
        return times[-1] - times[0]

    return virtual.run(answered())


@pytest.mark.parametrize("depth", [1, 4, 8])
def test_a_round_is_a_step_and_a_pass_of_the_head_for_each_token_and_no_hop(depth: int) -> None:
    """The target goes on by itself with its Drafts: only the first Verdict is waited for."""
    round_s = STEP_S + depth * PASS_S
    speculation = Speculation(mode="fixed", depth=depth, drafter="eagle3")
    taken = seconds(1.0, speculation)
    assert taken == pytest.approx((TOKENS - 1) / (depth + 1) * round_s + 2 * HOP_S, rel=0.01)


def test_plain_decoding_pays_for_the_pass_that_takes_tokens_in() -> None:
    assert seconds(1.0, fixed(0)) == pytest.approx((TOKENS - 1) * (STEP_S + PASS_S), rel=0.02)


@pytest.mark.parametrize("acceptance", [0.0, 0.5])
def test_wrong_guesses_cost_time_and_no_token(acceptance: float) -> None:
    speculation = Speculation(mode="fixed", depth=4, drafter="eagle3")
    assert seconds(acceptance, speculation) > seconds(1.0, speculation)


def test_a_pass_of_the_head_takes_a_fifteenth_of_the_targets_step() -> None:
    """1.4 billion weights of a 70B model's: four devices share 1.2 billion of them."""
    assert HEAD.weight_bytes == pytest.approx((0.2 + 1.2 / 4) * 2e9, rel=0.01)
    assert HEAD.seconds(StepSize(1, 1)) == pytest.approx(1.04e-3, rel=0.02)
