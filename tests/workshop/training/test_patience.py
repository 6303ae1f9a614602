"""A training with a patience stops when held-out text tells of no gain, and keeps what was best."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.demo.prompts import DEMO
from tests.support.demo_pair import prompt_of
from tests.support.killed_training import killed_at
from workshop.training.loop import PROGRESS, Training
from workshop.training.medusa import MedusaTrainee
from workshop.training.settings import MedusaSettings
from workshop.training.stream import Stream
from workshop.training.target import FrozenTarget
from workshop.training.trainee import Trainee


class Told:
    """Held-out text that says what a test wants it to say."""

    title = "acceptance"

    def __init__(self, *values: float) -> None:
        self._values: Iterator[float] = iter(values)
        self.seen: list[torch.Tensor] = []  # weights at each measure

    def measure(self, trainee: Trainee, target: FrozenTarget) -> list[float]:
        self.seen.append(weight_of(trainee).clone())
        return [next(self._values), 0.0]


def weight_of(trainee: Trainee) -> torch.Tensor:
    return next(trainee.network.parameters()).detach()


def training_of(output: Path, held_out: Told, **others: Any) -> tuple[Training, Trainee]:
    given: dict[str, Any] = {"rows": 2, "length": 16, "depth": 2, "measure_every": 2, "save_every": 2}
    settings = MedusaSettings(
        target=DEMO / "target", output=output, text=Path(__file__), **{**given, "steps": 20, **others}
    )
    target = FrozenTarget(settings.target)
    trainee = MedusaTrainee(settings, target)
    return Training(trainee, target, settings, held_out), trainee


@pytest.fixture(scope="module")
def text() -> Stream:
    return Stream.of([[*prompt_of("json")]])


def test_patience_ends_training_with_the_best_weights(text: Stream, tmp_path: Path) -> None:
    held_out = Told(0.1, 0.4, 0.5, 0.5, 0.2)
    training, trainee = training_of(tmp_path, held_out, patience=2)
    training.run(text)
    assert (training.steps, training.best_step) == (8, 4)
    assert torch.equal(weight_of(trainee), held_out.seen[2])
    assert not torch.equal(held_out.seen[2], held_out.seen[4])
    told = [json.loads(line) for line in (tmp_path / PROGRESS).read_text().splitlines()]
    assert [line["step"] for line in told] == [0, 2, 4, 6, 8]


def test_patience_keeps_weights_that_only_get_worse(text: Stream, tmp_path: Path) -> None:
    held_out = Told(0.9, 0.3, 0.2, 0.1)
    training, trainee = training_of(tmp_path, held_out, patience=3)
    training.run(text)
    assert training.best_step == 0
    assert torch.equal(weight_of(trainee), held_out.seen[0])


def test_training_without_patience_takes_all_steps_and_keeps_the_last_weights(
    text: Stream, tmp_path: Path
) -> None:
    held_out = Told(0.5, 0.4, 0.3)
    training, trainee = training_of(tmp_path, held_out, steps=6)
    training.run(text)
    assert (training.steps, training.best_step) == (6, 6)
    assert torch.equal(weight_of(trainee), held_out.seen[-1])


def test_patience_after_a_kill_remembers_the_best_weights(text: Stream, tmp_path: Path) -> None:
    whole, of_whole = training_of(tmp_path / "whole", Told(0.1, 0.5, 0.4, 0.3), patience=2)
    whole.run(text)
    killed, _ = training_of(tmp_path / "killed", Told(0.1, 0.5, 0.4), patience=2)
    with killed_at(5):
        killed.run(text)
    resumed, of_resumed = training_of(tmp_path / "killed", Told(0.3), patience=2)
    resumed.run(text)
    assert (resumed.steps, resumed.best_step) == (whole.steps, whole.best_step) == (6, 2)
    assert torch.equal(weight_of(of_resumed), weight_of(of_whole))
    progress = [(tmp_path / name / PROGRESS).read_text() for name in ("whole", "killed")]
    assert progress[0] == progress[1]
