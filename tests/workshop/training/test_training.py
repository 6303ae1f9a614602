"""Commands from prompts to a checkpoint, on a few short texts."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.demo.prompts import DEMO, prompts
from tests.support.demo_pair import prompt_of, text_of
from tests.support.killed_training import killed_at
from workshop.training.__main__ import main
from workshop.training.held_out import SumOfMinima
from workshop.training.loop import PROGRESS, UNFINISHED, Training
from workshop.training.settings import MedusaSettings
from workshop.training.target import FrozenTarget, Reading
from workshop.training.text import read_text
from workshop.training.trainee import PositionGuess, Trainee

KINDS = ("json", "arithmetic")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    asked = {kind: prompts(kind, 4) for kind in KINDS}
    (folder / "prompts.json").write_text(json.dumps(asked))
    assert write(folder, "text.jsonl") == 0
    return folder / "text.jsonl"


def write(folder: Path, output: str) -> int:
    given = ["--prompts", str(folder / "prompts.json"), "--output", str(folder / output), "--tokens", "24"]
    given += ["--at-once", "8"]
    return main(["text", "--target", str(DEMO / "target"), "--dtype", "float32", *given])


def train(text: Path, output: Path, *options: str, command: str = "medusa") -> int:
    given = ["--text", str(text), "--output", str(output), "--rows", "2", "--length", "32"]
    given += ["--steps", "6", "--save-every", "2", "--measure-every", "3", *options]
    return main([command, "--target", str(DEMO / "target"), *given])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "medusa_lm_head.safetensors")


def test_text_is_a_prompt_and_what_the_target_answers(text: Path) -> None:
    texts = [json.loads(line) for line in text.read_text().splitlines()]
    asked = {prompt_of(kind, index) for kind in KINDS for index in range(4)}
    assert {tuple(text["tokens"][: text["prompt"]]) for text in texts} == asked
    greedy = texts[4]  # temperatures take turns
    answer = tuple(greedy["tokens"][greedy["prompt"] :])
    assert 0 < len(answer) <= 24
    wanted = text_of(tuple(greedy["tokens"][: greedy["prompt"]]), 24, temperature=0.0)
    assert answer == wanted[: len(answer)]


def test_writing_that_was_cut_off_goes_on_where_it_was(text: Path) -> None:
    lines = text.read_text().splitlines(keepends=True)
    (text.parent / "again.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    assert write(text.parent, "again.jsonl") == 0
    assert (text.parent / "again.jsonl").read_text() == "".join(lines)


def test_held_out_texts_are_not_trained_on(text: Path) -> None:
    texts = [json.loads(line)["tokens"] for line in text.read_text().splitlines()]
    training, held_out = read_text(text)
    assert held_out.tokens.tolist() == texts[0]
    assert training.tokens.tolist() == [token for text in texts[1:] for token in text]


def test_training_that_is_killed_ends_as_if_it_had_not_been(text: Path, tmp_path: Path) -> None:
    assert train(text, tmp_path / "whole") == 0

    with killed_at(5):
        train(text, tmp_path / "killed")
    assert (tmp_path / "killed" / UNFINISHED).exists()
    assert train(text, tmp_path / "killed", "--seed", "2") == 1  # another one's steps
    assert train(text, tmp_path / "killed") == 0
    assert not (tmp_path / "killed" / UNFINISHED).exists()
    whole, killed = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert any(tensor.any() for tensor in whole.values())
    assert all(torch.equal(tensor, killed[name]) for name, tensor in whole.items())


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("eagle3", ["--layers", "2", "4", "6"]),
        ("dflash", ["--layers", "2", "4", "6", "--mask-token", "1", "--depth", "4"]),
        ("parallel", ["--draft", str(DEMO / "draft"), "--mask-token", "1"]),
    ],
)
def test_loss_falls_and_the_checkpoint_has_a_card(
    text: Path, tmp_path: Path, command: str, options: list[str]
) -> None:
    assert train(text, tmp_path, *options, "--steps", "24", "--measure-every", "12", command=command) == 0
    told = [json.loads(line) for line in (tmp_path / PROGRESS).read_text().splitlines()]
    assert [line["step"] for line in told] == [12, 24]
    first, last = (sum(line["sum of minima"]) for line in (told[0], told[-1]))
    assert last > 1.05 * first
    card = (tmp_path / "README.md").read_text()
    assert f"python -m workshop.training {command}" in card
    assert "- steps: 24" in card


class TwoGuesses(Trainee):
    """Two positions, the first guessed well or badly, and the second a third of the way from good to bad."""

    def __init__(self, first: bool, continues: bool | None) -> None:
        """continues: whether the second goes on from the first; None: there is no second."""
        self._first, self._continues, self.network = first, continues, torch.nn.Linear(1, 1)

    def guesses(
        self, reading: Reading, depth: int, generator: torch.Generator | None
    ) -> Iterator[PositionGuess]:
        places, log_probs = torch.arange(4), reading.probs.log()[:, :4]
        yield PositionGuess(log_probs if self._first else -10 * log_probs, places)
        if self._continues is not None:
            yield PositionGuess(log_probs / 3, places, self._continues)

    def save(self, folder: Path) -> None:
        """Keeps nothing."""


def test_loss_of_a_guess_counts_by_how_likely_it_is_reached(text: Path, tmp_path: Path) -> None:
    settings = MedusaSettings(target=DEMO / "target", output=tmp_path, text=text, rows=2, length=16)
    training_text, held_out = read_text(text)

    def loss(first: bool, continues: bool | None) -> float:
        trainee, target = TwoGuesses(first, continues), FrozenTarget(settings.target)
        training = Training(trainee, target, settings, SumOfMinima(held_out, settings))
        return training._loss(training_text, 0)[0].item()

    assert loss(True, True) == pytest.approx(loss(True, False))  # the first is always correct
    assert loss(True, False) != pytest.approx(loss(True, None))
    assert loss(False, True) == pytest.approx(loss(False, None))  # the first is never correct
    assert loss(False, False) != pytest.approx(loss(False, None))


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--rows", "0"], "rows='0': Input should be greater than or equal to 1"),
        (["--text", "nowhere.jsonl"], "text='nowhere.jsonl': Path does not point to a file"),
        (["--target", "nowhere"], "target='nowhere': Path does not point to a directory"),
    ],
)
def test_training_refuses_wrong_options_by_name(
    text: Path, tmp_path: Path, option: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(text, tmp_path, *option) == 1
    assert said in capsys.readouterr().err


def test_prompts_in_another_form_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.json").write_text('["one", "two"]')
    assert write(tmp_path, "text.jsonl") == 1
    assert 'must be JSON of this form: {"kind": ["prompt", ...], ...}' in capsys.readouterr().err
