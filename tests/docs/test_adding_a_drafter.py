"""docs/adding-a-drafter.md: its example drafts, nobody knows its name before, and its table is true."""

import ast
import asyncio
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from gateway.loop.factory import LoopFactory
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence
from gateway.settings import GatewaySettings, Speculation
from outrider.decoding.settings import Sampling
from outrider.drafters import registry
from outrider.pace.settings import PaceSettings
from tests.fakes.scripted import ScriptedTarget, fleet_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding-a-drafter.md"
SERVED = ("gateway", "actors", "cluster", "outrider/engine", "outrider/pace")
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


async def test_example_drafter_drafts_and_changes_no_text(example: None) -> None:
    speculation = Speculation(mode="fixed", depth=4, drafter="counting")
    sequence = GatewaySequence((11, 14, 17), Sampling(max_tokens=len(ANSWER)), noise_key=1)
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        factory = LoopFactory(fleet, Paces(PaceSettings()), GatewaySettings(model="m", tokenizer="t"))
        rounds = factory.of(sequence, speculation, asyncio.get_running_loop().time() + 60.0)
        async for _ in rounds.steps():
            pass
    assert sequence.generated == ANSWER
    assert rounds.stats.accepted == rounds.stats.drafted > 10


def test_example_drafter_is_unknown_before_it_is_registered() -> None:
    with pytest.raises(ValueError, match="there is no drafter 'counting'"):
        GatewaySettings(model="m", tokenizer="t").roster.find("counting")


def table() -> dict[str, tuple[set[str], set[str]]]:
    """Returns for each drafter its files, and other files that name it."""
    section = PAGE.read_text().partition("## What those that there are took")[2]
    rows = re.findall(r"^\| `([\w+]+)` \|(.*)\|(.*)\|$", section, re.M)
    return {
        name: ({*re.findall(r"`(\S+\.py)`", own)}, {*re.findall(r"`(\S+\.py)`", besides)})
        for name, own, besides in rows
    }


def naming(name: str) -> set[str]:
    """Files of what serves in which that text stands by itself."""
    files = [file for package in SERVED for file in (ROOT / package).rglob("*.py")]
    return {str(file.relative_to(ROOT)) for file in files if name in texts_of(file)}


@cache
def texts_of(file: Path) -> set[str]:
    found = (node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant))
    return {text for text in found if isinstance(text, str)}


def test_table_has_every_drafter_and_files_that_are_there() -> None:
    assert [*table()] == [row.name for row in registry.drafters()]
    for name, (own, _) in table().items():
        assert own
        assert all((ROOT / file).is_file() for file in own), name


@pytest.mark.parametrize("name", ["ngram", "suffix", "medusa", "eagle3", "mtp", "early_exit", "parallel"])
def test_table_tells_where_else_a_drafter_is_named(name: str) -> None:
    own, besides = table()[name]
    module = registry.drafter(name).implementation.partition(":")[0].replace(".", "/") + ".py"
    assert module in own or name == "parallel"  # which is a model that drafts in another way
    others = {"gateway/api/openai/fields.py"} if name == "suffix" else set()  # OpenAI's field of that name
    assert naming(name) - own - others == besides
