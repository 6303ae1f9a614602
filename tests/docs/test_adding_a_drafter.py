"""docs/adding-a-drafter.md: its example drafts, nobody knows its name before, and its table is true."""

import ast
import asyncio
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from gateway.loop.factory import LoopFactory
from gateway.observe.metrics import publish
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence
from gateway.settings import GatewaySettings, Speculation
from outrider.decoding.settings import Sampling
from outrider.drafters import registry
from outrider.pace.settings import PaceSettings
from tests.fakes.scripted import ScriptedTarget, fleet_of
from tests.support.local_worker import local_worker
from tests.support.published import Published
from tests.support.service import engine_settings, service_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding-a-drafter.md"
SERVED = ("gateway", "actors", "cluster", "outrider/engine", "outrider/pace")
ANSWER = [*range(20, 80, 3)]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_ROWS", dict(registry._ROWS))
    drafter, row, *of_worker = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    files = dict(zip(("counting", "cautious", "cautious_row"), (drafter, *of_worker), strict=True))
    for name, content in files.items():
        (tmp_path / f"{name}.py").write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    exec(row, {})
    yield
    for name in files:
        sys.modules.pop(name, None)


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


async def test_example_worker_drafter_is_counted_under_the_name_of_its_draft(example: None) -> None:
    gateway = {"drafts": {"careful": "cautious_row:ROW"}, "drafters": ("careful",)}
    asked = {"prompt": "a b c d", "max_tokens": 30, "min_tokens": 30, "seed": 5}
    asked["speculation"] = {"mode": "fixed", "depth": 4, "report": True}
    async with (
        local_worker("draft", engine_settings("draft", worker_drafter="cautious_row:ROW")) as draft,
        service_of(drafts=0, gateway=gateway) as service,
    ):
        service.others.append(replace(draft.published, draft="careful"))
        answer = (await service.http.post("/v1/completions", json=asked)).json()
        plain = {**asked, "speculation": {"mode": "off"}}
        expected = (await service.http.post("/v1/completions", json=plain)).json()
        published = Published()
        publish(service.generation, published)  # type: ignore[arg-type]
    report = answer["usage"]["speculation"]
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
    assert report["drafter"] == "careful"
    assert 0 < report["drafted"] <= report["rounds"]
    drafted = published.totals["vllm_spec_decode_num_draft_tokens", "none", "careful", "m", "0"]
    assert drafted == report["drafted"]


def test_example_drafter_is_unknown_before_it_is_registered() -> None:
    with pytest.raises(ValueError, match="there is no drafter 'counting'"):
        GatewaySettings(model="m", tokenizer="t").roster.find("counting")


def table() -> dict[str, tuple[set[str], set[str]]]:
    """Returns for each drafter its files, and other files that name it."""
    section = PAGE.read_text().partition("## What the present drafters took")[2]
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


@pytest.mark.parametrize(
    "name", ["ngram", "suffix", "medusa", "eagle3", "dflash", "mtp", "early_exit", "parallel"]
)
def test_table_tells_where_else_a_drafter_is_named(name: str) -> None:
    own, besides = table()[name]
    module = registry.drafter(name).implementation.partition(":")[0].replace(".", "/") + ".py"
    assert module in own or name == "parallel"  # which is a model that drafts in another way
    others = {"gateway/api/openai/fields.py"} if name == "suffix" else set()  # OpenAI's field of that name
    assert naming(name) - own - others == besides
