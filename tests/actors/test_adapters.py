"""An adapter over gRPC: the gateway's rounds with a draft that lacks it say what its target says alone."""

import asyncio
from pathlib import Path

from gateway.adapter import Adapter
from outrider.demo.prompts import DEMO
from tests.support.adapters import write_adapter
from tests.support.functions import needs_functions
from tests.support.pair import OFF, answer, pair


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
