"""docs/adding-a-model.md: its example runs through the fast decoder, and its tables name every field."""

import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from outrider.decoding.settings import Sampling
from outrider.engine.forward.decoder import Decoder
from outrider.engine.loop.engine import Engine
from outrider.engine.models import registry
from outrider.engine.models.architecture import Architecture, Mixture
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import differences, reference, write_checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-model.md"
MODEL = "SeedOssForCausalLM"
PROMPTS = [[5, 6, 7, 8, 9], [*range(40, 60)]]
COUNT = 12  # tokens of each answer


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registers the page's architecture for one test."""
    monkeypatch.setattr(registry, "_ROWS", dict(registry._ROWS))
    description, row = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "seed_oss.py").write_text(description)
    monkeypatch.syspath_prepend(str(tmp_path))
    exec(row, {})
    yield
    sys.modules.pop("seed_oss", None)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Decoder]:
    """Decoder of every pass that the fast decoder computes."""
    seen: list[Decoder] = []
    compute = Decoder.__call__

    def noted(self: Decoder, *arguments: object) -> object:
        seen.append(self)
        return compute(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "__call__", noted)
    return seen


def answers(folder: Path) -> list[list[int]]:
    """Returns the engine's greedy answers, behind a self-check."""
    settings = EngineSettings(model=str(folder), dtype="float32", cache_memory=2**20, threads=1)
    sampling = Sampling(temperature=0, max_tokens=COUNT, ignore_eos=True)
    requests = [OfflineRequest(tuple(prompt), sampling, 0) for prompt in PROMPTS]
    outputs = generate(Engine.from_settings(settings), None, requests, 0)
    return [[*output.tokens] for output in outputs]


def test_example_registered_runs_through_the_fast_decoder(
    example: None, passes: list[Decoder], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path, "seed_oss", head_dim=16)
    with caplog.at_level(logging.ERROR):
        found = answers(folder)
    assert "fast decoder" not in caplog.text
    assert len(passes) > COUNT
    assert not differences(reference(folder, PROMPTS, COUNT), found)


def test_example_not_registered_runs_through_transformers(passes: list[Decoder], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "seed_oss", head_dim=16)
    found = answers(folder)
    assert not passes
    assert not differences(reference(folder, PROMPTS, COUNT), found)


def test_tables_name_every_field_of_a_description() -> None:
    named = {name for row in re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.M) for name in row.split(", ")}
    assert named == {f"`{field.name}`" for kind in (Architecture, Mixture) for field in fields(kind)}


def test_register_model_that_has_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="there is an architecture of LlamaForCausalLM already"):
        registry.register(Architecture("LlamaForCausalLM"))
