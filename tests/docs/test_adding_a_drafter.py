"""The worked example of docs/adding-a-drafter.md drafts, and nobody knows its name before."""

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.rounds.factory import RoundsFactory
from gateway.rounds.paces import Paces
from gateway.sequence import Sequence
from gateway.settings import GatewaySettings, Speculation
from outrider.decoding.settings import Sampling
from outrider.drafters import registry
from outrider.pace.settings import PaceSettings
from tests.fakes.scripted import ScriptedTarget, fleet_of

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-drafter.md"
ANSWER = [*range(20, 80, 3)]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_ROWS", dict(registry._ROWS))
    drafter, row = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "counting.py").write_text(drafter)
    monkeypatch.syspath_prepend(str(tmp_path))
    exec(row, {})
    yield
    sys.modules.pop("counting", None)


async def test_the_example_drafts_and_changes_no_text(example: None) -> None:
    speculation = Speculation(mode="fixed", depth=4, drafter="counting")
    sequence = Sequence((11, 14, 17), Sampling(max_tokens=len(ANSWER)), noise_key=1)
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        factory = RoundsFactory(fleet, Paces(PaceSettings()), GatewaySettings(model="m", tokenizer="t"))
        rounds = factory.of(sequence, speculation, asyncio.get_running_loop().time() + 60.0)
        async for _ in rounds.steps():
            pass
    assert sequence.generated == ANSWER
    assert rounds.stats.accepted == rounds.stats.drafted > 10


def test_nobody_knows_it_before() -> None:
    with pytest.raises(ValueError, match="there is no drafter 'counting'"):
        GatewaySettings(model="m", tokenizer="t").roster.find("counting")
