"""A training run of a few steps makes a whole pair, the same one every time."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.demo.prompts import KINDS
from workshop.demo.train import Phase, Schedule, train

pytestmark = pytest.mark.slow

TINY = Schedule(
    characters=100_000,
    draws=600,
    target=(Phase(2, 2, 64), Phase(1, 1, 96)),
    reading=(Phase(2, 2, 64),),
    distillation=Phase(2, 4, 48),
    lengthening=(Phase(1, 1, 96),),
    written_rows=2,
    writing_temperatures=(1.0, 0.0),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    train(folder, TINY)
    return folder


@pytest.mark.parametrize("role", ["target", "draft"])
def test_train_checkpoints_can_be_loaded(pair: Path, role: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(pair / role)
    tokenizer = AutoTokenizer.from_pretrained(pair / role)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == [0, 5]
    logits = model(**tokenizer("hello", return_tensors="pt", return_token_type_ids=False)).logits
    assert logits.isfinite().all()


def test_prompts_are_written_beside_the_pair(pair: Path) -> None:
    assert all(f'"{kind}"' in (pair / "prompts.json").read_text() for kind in KINDS)


def test_second_run_makes_the_same_files(pair: Path, tmp_path: Path) -> None:
    train(tmp_path, TINY)
    files = [path.relative_to(pair) for path in pair.rglob("*") if path.is_file()]
    assert len(files) == 13
    for file in files:
        assert (tmp_path / file).read_bytes() == (pair / file).read_bytes(), file
