"""Workers further away: the same text, and a round costs the hops it must."""

from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from gateway.loop.factory import LoopFactory
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence
from gateway.settings import GatewaySettings, Speculation
from gateway.workers.fleet import Fleet
from outrider.decoding.settings import Sampling
from outrider.pace.settings import PaceSettings
from tests.fakes.scripted import TRUST, ScriptedDraft, ScriptedTarget, fleet_of
from tests.support.patience import later
from tests.support.relay import relay

ANSWER = [*range(100)]


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("delay_ms", [0.3, 2.0, 10.0])
@pytest.mark.parametrize("mode", ["off", "fixed"])
async def test_loop_delay_per_hop_changes_no_token(delay_ms, mode):
    async with AsyncExitStack() as stack:
        near = await stack.enter_async_context(
            fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER, wrong=[3, 50]))
        )
        workers = [
            replace(worker, address=await stack.enter_async_context(relay(worker.address, delay_ms / 1e3)))
            for worker in near.workers()
        ]
        far = Fleet(lambda: workers, TRUST)
        stack.push_async_callback(far.close)
        sequence = GatewaySequence((1, 2), Sampling(max_tokens=len(ANSWER)), noise_key=0)
        speculation = Speculation(mode=mode, depth=4, drafter="model")
        settings = GatewaySettings(model="m", tokenizer="t")
        rounds = LoopFactory(far, Paces(PaceSettings()), settings).of(sequence, speculation, later(60))
        async for _ in rounds.steps():
            pass
    assert sequence.generated == ANSWER
    assert (rounds.stats.lost_targets, rounds.stats.lost_drafts, rounds.stats.late_drafts) == (0, 0, 0)
    if mode == "fixed":
        assert rounds.stats.accepted + rounds.stats.target_passes == len(ANSWER)
