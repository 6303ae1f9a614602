"""An adapter over gRPC: the gateway's rounds with a draft that lacks it say what its target says alone."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from gateway.adapter import Adapter
from gateway.errors import InvalidRequestError
from gateway.workers.fleet import Fleet
from outrider.demo.prompts import DEMO
from outrider.engine.settings import EngineSettings
from tests.support.adapters import write_adapter
from tests.support.functions import needs_functions
from tests.support.pair import FIXED, OFF, answer, pair, rounds_of
from tests.support.process_worker import process_worker
from tests.support.trust import TRUST


@needs_functions
async def test_rounds_of_several_adapters_say_what_plain_decoding_says(tmp_path: Path) -> None:
    adapters = {
        name: str(write_adapter(tmp_path / name, DEMO / "target", seed, strength=0.6))
        for seed, name in enumerate("ab")
    }
    async with pair(0, adapters=adapters) as fleet:
        names = ("", "a", "b")
        plain = [await answer(fleet, "code", 0.7, speculation=OFF, adapter=Adapter(name)) for name in names]
        drafted = await asyncio.gather(*[answer(fleet, "code", 0.7, adapter=Adapter(name)) for name in names])
    assert [text for text, _ in drafted] == [text for text, _ in plain]
    assert len({tuple(text) for text, _ in plain}) == len(names)
    assert all(stats.rounds for _, stats in drafted)


def settings_of(folder: Path | None) -> EngineSettings:
    usual = {"model": str(DEMO / ("target" if folder else "draft")), "dtype": "float32", "threads": 1}
    return EngineSettings.model_validate(
        {**usual, "cache_memory": 2**26, "adapter_folder": str(folder) if folder else None}
    )


@pytest.mark.slow
async def test_loaded_adapter_outlives_its_end_and_its_worker_under_a_sequence(tmp_path: Path) -> None:
    """The second target is told of the adapter by the sequence alone. Engines are processes of their own."""
    write_adapter(tmp_path / "a", DEMO / "target", 1, strength=0.6)
    async with (
        process_worker("target", settings_of(tmp_path)) as first,
        process_worker("target", settings_of(tmp_path)) as second,
        process_worker("draft", settings_of(None)) as draft,
    ):
        workers = [first, draft]
        fleet = Fleet(lambda: workers, TRUST)
        adapter = await fleet.load_adapter(Adapter("a", "a"))
        expected, _ = await answer(fleet, "code", 0.7, speculation=OFF, adapter=adapter)
        without, _ = await answer(fleet, "code", 0.7, speculation=OFF)
        rounds = rounds_of(fleet, "code", 0.7, FIXED, adapter=adapter)
        text: list[int] = []
        async for step in rounds.steps():
            text += [token.id for token in step.tokens]
            if second not in workers:  # after the first step
                await fleet.drop_adapter(adapter)
                workers.append(second)
                os.kill(first.ranks[0], signal.SIGKILL)
        assert text == expected != without
        assert rounds.stats.rounds
        await fleet.close()


@pytest.mark.slow
async def test_adapter_that_one_target_cannot_load_is_loaded_nowhere(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    write_adapter(here / "a", DEMO / "target", 1)
    write_adapter(there / "a", DEMO / "target", 1, use_dora=True)
    write_adapter(here / "b", DEMO / "target", 1)
    write_adapter(there / "b", DEMO / "target", 2)
    async with (
        process_worker("target", settings_of(here)) as first,
        process_worker("target", settings_of(there)) as second,
    ):
        fleet, alone = Fleet(lambda: [first, second], TRUST), Fleet(lambda: [first], TRUST)
        with pytest.raises(InvalidRequestError, match=r"lora_path: adapters\.x='a': use_dora=True is not"):
            await fleet.load_adapter(Adapter("x", "a"))
        with pytest.raises(InvalidRequestError, match="lora_path: 'b' differs from target to target"):
            await fleet.load_adapter(Adapter("x", "b"))
        loaded = await alone.load_adapter(Adapter("x", "a"))
        (here / "a" / "adapter_config.json").unlink()
        await alone.drop_adapter(loaded)
        with pytest.raises(InvalidRequestError, match=r"model: adapters\.x='a': its adapter_config\.json"):
            await answer(alone, "code", 0.7, speculation=OFF, adapter=loaded)
        for each in (fleet, alone):
            await each.close()
