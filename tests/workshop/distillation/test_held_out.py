"""Acceptance on held-out prompts is what rounds of the engine would count."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from outrider.demo.prompts import DEMO
from outrider.engine.colocated.draft_model import DraftModel
from tests.support.demo_pair import engine, prompt_of
from workshop.advice.answers import Prompt, TargetAnswer, answered
from workshop.advice.judged import FIRST
from workshop.advice.judging import judge_text
from workshop.distillation.held_out import AcceptanceTally, CoupledAcceptance, HeldOutText
from workshop.training.model import ModelTrainee
from workshop.training.settings import ModelTrainingSettings
from workshop.training.target import FrozenTarget, Reading
from workshop.training.trainee import PositionGuess, Trainee

KINDS = ("json", "prose", "code")


@cache
def answers(temperature: float) -> list[TargetAnswer]:
    prompts = [Prompt(kind, prompt_of(kind)) for kind in KINDS]
    return answered(engine("target"), prompts, temperature, 40, seed=3)


def held_out(temperature: float) -> list[HeldOutText]:
    return [
        HeldOutText(
            answer.text, len(answer.request.prompt), answer.request.noise_key, temperature, answer.task
        )
        for answer in answers(temperature)
    ]


@cache
def target() -> FrozenTarget:
    return FrozenTarget(DEMO / "target")


@cache
def draft() -> Trainee:
    settings = ModelTrainingSettings(
        target=DEMO / "target", draft=DEMO / "draft", output=Path("unused"), text=Path(__file__)
    )
    return ModelTrainee(settings, target())


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_draft_model_guesses_are_correct_where_the_engines_are(temperature: float) -> None:
    judged = judge_text(DraftModel(engine("draft")), answers(temperature), 1)
    tallies = CoupledAcceptance(held_out(temperature), 1024, 1).by_task(draft(), target())
    assert list(tallies) == list(KINDS)
    for answer in judged:
        starts = answer.starts[FIRST:-1]  # the last token is the target's own
        kind = KINDS[judged.index(answer)]
        assert tallies[kind].reached == [len(starts)]
        assert tallies[kind].accepted == [sum(start.correct for start in starts)]
    assert 0.3 < CoupledAcceptance(held_out(temperature), 1024, 1).measure(draft(), target())[0] < 1.0


def test_long_text_is_read_from_its_end_at_its_own_positions() -> None:
    (text, *_) = held_out(1.0)
    answer_length = len(text.tokens) - text.prompt_length
    whole = CoupledAcceptance([text], 1024, 1).by_task(draft(), target())[text.task]
    cut = CoupledAcceptance([text], answer_length + 10, 1).by_task(draft(), target())[text.task]
    assert cut.reached == whole.reached
    assert abs(cut.accepted[0] - whole.accepted[0]) <= 0.2 * whole.accepted[0]
    short = CoupledAcceptance([text], 8, 1).by_task(draft(), target())[text.task]
    assert short.reached == [6]


class Scripted(Trainee):
    """Guesses the correct token at its first position always, at its second where the place is even."""

    title = "scripted"
    network = torch.nn.Identity()

    def guesses(
        self, reading: Reading, depth: int, generator: torch.Generator | None
    ) -> Iterator[PositionGuess]:
        tokens = reading.tokens[0]
        starts = torch.arange(len(tokens) - depth)
        for position in range(depth):
            places = starts + position
            said = tokens[places + 1]
            wrong = (position > 0) & (starts % 2 == 1)
            logits = torch.zeros(1, len(starts), 64)
            logits[0, torch.arange(len(starts)), torch.where(wrong, 63, said)] = 1.0
            yield PositionGuess(logits, places)

    def save(self, folder: Path) -> None:
        raise AssertionError


def test_position_counts_where_those_before_it_were_right() -> None:
    text = HeldOutText(tuple(range(24)), prompt_length=10, noise_key=1, temperature=0.0)
    tally = CoupledAcceptance([text, replace(text)], 1024, 3).by_task(Scripted(), target())["all"]
    # Drafts whose first token is 11 to 21, after places 10 to 20: six of them even. None is told of token 23.
    assert (tally.texts, tally.reached, tally.accepted) == (2, [22, 22, 10], [22, 12, 10])
    assert tally.rates == [1.0, 12 / 22, 1.0]


def test_position_that_no_draft_reached_has_no_acceptance() -> None:
    tally = AcceptanceTally()
    tally.count(0, 4, 0)
    tally.count(1, 0, 0)
    assert tally.rates == [0.0, 0.0]
