"""Medusa heads: the same text, real acceptance, the published forms, what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.demo.prompts import DEMO
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings, TargetDrafterSettings
from tests.support.heads import HEADS, medusa_tensors, refusal_of, write_medusa
from tests.support.target_drafters import drafted_texts, engine_with, plain_texts

FORMS = ("authors", "safetensors", "vllm")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_medusa(tmp_path_factory.mktemp("heads") / "medusa")


@pytest.fixture(scope="module")
def target(heads: Path) -> Engine:
    return engine_with("medusa", heads)


@pytest.mark.parametrize(
    ("temperature", "company"),
    [
        (0.0, 6),
        (0.7, 1),
        *(pytest.param(temperature, 6, marks=pytest.mark.slow) for temperature in (0.7, 1.0)),
    ],
)
def test_text_is_the_same_with_drafts_and_without(target: Engine, temperature: float, company: int) -> None:
    found = drafted_texts(target, temperature, depth=4, company=company)
    assert [text.tokens for text in found] == plain_texts(temperature)
    assert sum(text.accepted for text in found) > 0


def test_guesses_are_right_much_more_often_than_by_chance(target: Engine) -> None:
    found = drafted_texts(target, 0.0, depth=4, company=6)
    accepted, rounds = sum(text.accepted for text in found), sum(text.rounds for text in found)
    assert accepted > 0.2 * rounds


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("form", FORMS)
def test_every_published_form_holds_the_same_heads(tmp_path: Path, target: Engine, form: str) -> None:
    other = engine_with("medusa", write_medusa(tmp_path / form, form))
    expected, found = (drafted_texts(model, 0.7, depth=4, company=6) for model in (target, other))
    assert found == expected


def test_chain_is_no_deeper_than_there_are_heads(target: Engine) -> None:
    found = drafted_texts(target, 0.0, depth=8, company=6)
    assert max(text.deepest for text in found) == HEADS


def test_heads_without_a_projection_share_the_targets(tmp_path: Path) -> None:
    folder = write_medusa(tmp_path / "shared")
    tensors = {name: tensor for name, tensor in medusa_tensors().items() if "linear" in name}
    torch.save(tensors, folder / "medusa_lm_head.pt")
    found = drafted_texts(engine_with("medusa", folder), 0.0, depth=4, company=6)
    assert [text.tokens for text in found] == plain_texts(0.0)
    assert max(text.deepest for text in found) == HEADS


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_under_rejection_or_block_drafts_say_what_they_were_drawn_from(target: Engine, rule: str) -> None:
    found = drafted_texts(target, 1.0, depth=4, company=6, verification=rule)
    assert sum(text.accepted for text in found) > 0
    assert all(len(text.tokens) == len(plain) for text, plain in zip(found, plain_texts(1.0), strict=True))


def refused(tensors: dict[str, Any], folder: Path, **config: Any) -> str:
    write_medusa(folder, **config)
    torch.save(tensors, folder / "medusa_lm_head.pt")
    return refusal_of("medusa", folder)


def test_heads_of_another_target_are_refused_by_what_differs(tmp_path: Path) -> None:
    tensors = medusa_tensors()
    narrow = {**tensors, "0.0.linear.weight": torch.zeros(128, 128)}
    assert "0.0.linear.weight is [128, 128] and must be [256, 256]" in refused(narrow, tmp_path)
    vocabulary = {**tensors, "2.1.weight": torch.zeros(999, 256)}
    assert "2.1.weight is [999, 256] and must be [2048, 256]" in refused(vocabulary, tmp_path)
    assert "not those of Medusa heads" in refused({"midlayer.weight": torch.zeros(2)}, tmp_path)
    gap = {name: tensor for name, tensor in tensors.items() if not name.startswith("1.")}
    assert "not those of Medusa heads" in refused(gap, tmp_path)


def test_pickle_that_would_run_code_is_not_read(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "was-run",))

    assert "cannot be read as tensors" in refused({"0.0.linear.weight": Harmful()}, tmp_path)
    assert not (tmp_path / "was-run").exists()


def test_medusa_checkpoint_that_is_missing_is_told(tmp_path: Path) -> None:
    settings = EngineSettings(
        model=str(DEMO / "target"), cache_memory=2**22, drafters={"medusa": TargetDrafterSettings()}
    )
    with pytest.raises(UnsupportedModelError, match=r"drafters\.medusa\.checkpoint is not given"):
        Engine.from_settings(settings)
    empty = settings.model_copy(
        update={"drafters": {"medusa": TargetDrafterSettings(checkpoint=str(tmp_path))}}
    )
    with pytest.raises(UnsupportedModelError, match=r"config\.json cannot be read"):
        Engine.from_settings(empty)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="no file of weights"):
        Engine.from_settings(empty)
