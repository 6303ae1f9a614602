"""Experts that `outrider advise` counts on the target's own answers."""

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.engine.loop.engine import Engine
from outrider.pace.experts import NO_EXPERTS, ExpertsRead
from tests.support.checkpoints import write_checkpoint
from tests.support.launching import settings_of
from workshop.advice.advice import Advice
from workshop.advice.answers import Prompt, TargetAnswer, answered
from workshop.advice.experts import counted_experts
from workshop.advice.report import as_json, report


def answers_of(folder: Path, kind: str) -> tuple[Engine, list[TargetAnswer]]:
    engine = Engine.from_settings(settings_of(write_checkpoint(folder, kind), device="cpu"))
    prompts = [Prompt("all", tuple(range(5 + number, 15 + number))) for number in range(4)]
    return engine, answered(engine, prompts, 0.7, 24, seed=0)


def test_experts_of_answers_are_counted_for_a_token_and_for_more(tmp_path: Path) -> None:
    """A token chooses two of eight experts, and five tokens choose more, but at most all of their own."""
    engine, answers = answers_of(tmp_path, "glm4_moe")
    found = counted_experts(engine, answers)
    assert found.share(1, 1) == pytest.approx(2 / 8, rel=0.2)
    assert found.share(1, 1) < found.share(1, 5) < 5 * found.share(1, 1)
    assert not engine.has_work
    assert engine.load().decoding == 0


def test_experts_of_a_dense_model_are_not_counted(tmp_path: Path) -> None:
    assert counted_experts(*answers_of(tmp_path, "qwen3")) == NO_EXPERTS


def test_advice_tells_which_experts_were_counted() -> None:
    advice = Advice("t", (1,), False, 2.0, (None,), experts=ExpertsRead.independent(8 / 128))
    assert "a token reads 6.2% of them, five of a text 27.6%" in report(advice)
    assert as_json(advice)["experts_read_by_tokens"] == pytest.approx({1: 0.0625, 5: 0.2758}, abs=1e-4)
    without = replace(advice, experts=NO_EXPERTS)
    assert "experts" not in report(without)
    assert as_json(without)["experts_read_by_tokens"] == {}
