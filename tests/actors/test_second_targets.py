"""Streams go on at a second target when the first hangs or is drained. Engines and gRPC are real."""

import asyncio
import os
import signal
from collections.abc import Sequence

import pytest

from gateway.loop import second_targets
from gateway.loop.factory import LoopFactory
from gateway.loop.loop import SequenceLoop
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence
from gateway.settings import GatewaySettings, Speculation
from gateway.workers.fleet import Fleet
from gateway.workers.streams import Role, WorkerInfo
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO
from outrider.engine.settings import EngineSettings
from outrider.pace.settings import PaceSettings
from tests.support.demo_pair import prompt_of, text_of
from tests.support.local_worker import local_worker
from tests.support.patience import LIMIT_S, eventually
from tests.support.process_worker import process_worker
from tests.support.trust import TRUST

TOKENS = 160
KINDS = ("code", "prose", "json", "stories")
SPECULATIONS = [Speculation(mode="off"), Speculation(mode="fixed", depth=3)]


def settings_of(role: Role) -> EngineSettings:
    fields = {"model": str(DEMO / role), "dtype": "float32", "threads": 1, "cache_memory": 2**26}
    return EngineSettings.model_validate(fields)


def loops_of(workers: Sequence[WorkerInfo], speculation: Speculation) -> tuple[Fleet, list[SequenceLoop]]:
    """Returns a loop for each kind of text, all of one gateway."""
    fleet = Fleet(lambda: workers, TRUST)
    settings = GatewaySettings(model="m", tokenizer="t", propose_deadline_ms=1e3 * LIMIT_S)
    factory = LoopFactory(fleet, Paces(PaceSettings()), settings)
    loops = []
    for kind in KINDS:
        prompt = prompt_of(kind)
        sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, temperature=0.7)
        sequence = GatewaySequence(prompt, sampling, noise_key(1, 0, prompt))
        deadline = asyncio.get_running_loop().time() + LIMIT_S
        loops.append(factory.of(sequence, speculation.resolved("model", PaceSettings()), deadline))
    return fleet, loops


async def read(loop: SequenceLoop, said: list[int]) -> None:
    async for step in loop.steps():
        said += [token.id for token in step.tokens]


@pytest.mark.slow
@pytest.mark.parametrize("speculation", SPECULATIONS, ids=lambda each: each.mode)
async def test_streams_of_an_engine_that_hangs_go_on_at_the_second_target(
    monkeypatch: pytest.MonkeyPatch, speculation: Speculation
) -> None:
    monkeypatch.setattr(second_targets, "RENEWED_AFTER", 8)
    monkeypatch.setattr(second_targets, "START_S", LIMIT_S)  # no stream is too many
    expected = [list(text_of(prompt_of(kind), TOKENS, temperature=0.7)) for kind in KINDS]
    async with (
        process_worker("target", settings_of("target")) as first,
        process_worker("target", settings_of("target")) as second,
        process_worker("draft", settings_of("draft")) as draft,
    ):
        workers = [first, draft]
        fleet, loops = loops_of(workers, speculation)
        texts: list[list[int]] = [[] for _ in loops]
        reading = [asyncio.create_task(read(*each)) for each in zip(loops, texts, strict=True)]
        await eventually(lambda: all(len(text) > 40 for text in texts))
        workers.append(second)
        os.kill(first.ranks[0], signal.SIGSTOP)
        try:
            await asyncio.gather(*reading)
        finally:
            os.kill(first.ranks[0], signal.SIGCONT)
            await fleet.close()
    assert texts == expected
    assert [loop.stats.moves for loop in loops] == [1] * len(loops)
    assert [loop.stats.lost_targets for loop in loops] == [0] * len(loops)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("speculation", SPECULATIONS, ids=lambda each: each.mode)
async def test_streams_of_a_drained_target_move_before_it_ends_them(speculation: Speculation) -> None:
    expected = [list(text_of(prompt_of(kind), TOKENS, temperature=0.7)) for kind in KINDS]
    async with (
        local_worker("target", settings_of("target")) as first,
        local_worker("target", settings_of("target")) as second,
        local_worker("draft", settings_of("draft")) as draft,
    ):
        workers = [first.published, draft.published]
        fleet, loops = loops_of(workers, speculation)
        texts: list[list[int]] = [[] for _ in loops]
        reading = [asyncio.create_task(read(*each)) for each in zip(loops, texts, strict=True)]
        await eventually(lambda: all(len(text) > 20 for text in texts))
        workers.append(second.published)
        await first.client.drain(LIMIT_S)
        left = [len(text) for text in texts]
        await asyncio.gather(*reading)
        await fleet.close()
    assert max(left) < TOKENS  # it was over before the streams were
    assert texts == expected
    assert [loop.stats.moves for loop in loops] == [1] * len(loops)
    assert [loop.stats.lost_targets for loop in loops] == [0] * len(loops)
