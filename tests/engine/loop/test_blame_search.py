"""Steps of a runner that fails when it is told to, without a model."""

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pytest
import torch

from outrider.decoding.draft import Draft
from outrider.decoding.lease import NO_LEASE
from outrider.decoding.settings import Sampling
from outrider.engine.blame import NotFiniteError
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.choosing.sampler import Choices, RowNumbers
from outrider.engine.errors import CacheLostError
from outrider.engine.forward.batch import Item
from outrider.engine.loop.blame_search import BlameSearch
from outrider.engine.loop.launched import ONE_POSITION, Finished, Launched, Reach
from outrider.engine.loop.runner import Runner
from outrider.engine.scheduling.scheduler import Selected
from outrider.engine.sequence import NO_DRAFT, EngineSequence
from outrider.engine.settings import EngineSettings
from outrider.engine.tasks.decode import DecodeTask
from outrider.pace.step import Step, StepSize

PROMPT = (5, 6, 7, 8)
DRAFT = Draft.chain((9, 10))
NEXT_STEP = cast(Launched, object())


class FailingRunner:
    """Runner whose steps raise if ``harms`` raises for them; ``spoilt`` says whose numbers are not finite."""

    def __init__(
        self,
        harms: Callable[[Selected], None] = lambda selected: None,
        spoilt: Callable[[Selected, Item], bool] = lambda selected, item: False,
    ) -> None:
        self.settings = EngineSettings(model="none", device="cpu")
        self.cache = PagedCache({}, 8, 8, torch.float32, torch.device("cpu"))
        self.fed: list[list[tuple[int, int]]] = []  # number and tokens of each sequence, for each step
        self._harms = harms
        self._spoilt = spoilt

    def run(
        self,
        selected: Selected,
        launched: Launched | None = None,
        following: Sequence[DecodeTask] = (),
        reach: Reach = ONE_POSITION,
    ) -> Finished:
        self.fed.append([(item.sequence.number, len(item.tokens)) for _, item in selected])
        self._harms(selected)
        are_finite = [[not self._spoilt(selected, item)] * len(item.tokens) for _, item in selected]
        choices = [self._choices(item.num_logits) for _, item in selected]
        step = Step(len(self.fed), StepSize(len(selected), 0), 0.0)
        return Finished(step, choices, are_finite, NEXT_STEP if following else None)

    @staticmethod
    def _choices(count: int) -> Choices:
        numbers = RowNumbers(torch.zeros(count, 1), np.zeros((count, 1), np.float32), are_all_valid=True)
        return Choices(numbers, slice(None), [0] * count, [])


def selected_of(count: int, draft: Draft = NO_DRAFT) -> Selected:
    """Returns the items of sequences 0, 1, ..., each with its whole prompt and the Draft."""
    selected: Selected = []
    for number in range(count):
        sequence = EngineSequence(number, len(PROMPT), 1, Sampling(), frozenset(), 100)
        sequence.tokens = [*PROMPT]
        task = DecodeTask(sequence, draft, 0, 64, 0.0, NO_LEASE)
        tokens = [*PROMPT, *draft.tokens]
        selected.append((task, Item(sequence, tokens, len(PROMPT), 1 + len(draft), None)))
    return selected


def search(runner: FailingRunner) -> BlameSearch:
    return BlameSearch(cast(Runner, runner))


def raising(error: Exception, *numbers: int) -> Callable[[Selected], None]:
    """Raises the error in steps with one of the sequences."""

    def harms(selected: Selected) -> None:
        if any(item.sequence.number in numbers for _, item in selected):
            raise error

    return harms


def test_step_without_error_is_run_once_and_keeps_the_next_step() -> None:
    runner, selected = FailingRunner(), selected_of(3)
    outcome = search(runner).run(selected, following=[cast(DecodeTask, selected[0][0])])
    assert len(runner.fed) == len(outcome.passes) == 1
    assert [item for _, item, _ in outcome.chosen] == [item for _, item in selected]
    assert outcome.next_step is NEXT_STEP


def test_sequence_that_raises_is_found_by_halves() -> None:
    runner, error = FailingRunner(raising(ZeroDivisionError(), 5)), ZeroDivisionError
    outcome = search(runner).run(selected_of(8))
    assert [(sequence.number, type(why)) for sequence, why in outcome.blamed] == [(5, error)]
    assert [item.sequence.number for _, item, _ in outcome.chosen] == [0, 1, 2, 3, 4, 6, 7]
    assert [len(fed) for fed in runner.fed] == [8, 4, 4, 2, 1, 1, 2]


def test_error_of_a_broken_process_is_raised_without_a_second_step() -> None:
    runner = FailingRunner(raising(CacheLostError("moved"), 0))
    with pytest.raises(CacheLostError):
        search(runner).run(selected_of(2))
    assert len(runner.fed) == 1


def test_prompt_too_large_for_memory_is_halved_until_a_token_is_too_large() -> None:
    runner = FailingRunner(raising(MemoryError(), 0))
    with pytest.raises(MemoryError):
        search(runner).run(selected_of(1))
    assert [fed for (fed,) in runner.fed] == [(0, 4), (0, 2), (0, 1)]


def test_sequence_that_another_sequence_spoils_runs_alone() -> None:
    runner = FailingRunner(spoilt=lambda selected, item: len(selected) > 1 and item.sequence.number == 1)
    selected = selected_of(3)
    outcome = search(runner).run(selected, following=[cast(DecodeTask, selected[0][0])])
    assert not outcome.blamed
    assert sorted(item.sequence.number for _, item, _ in outcome.chosen) == [0, 1, 2]
    assert [len(fed) for fed in runner.fed] == [3, 1]
    assert outcome.next_step is None


def test_sequence_with_numbers_that_are_not_finite_is_tried_without_its_draft() -> None:
    runner = FailingRunner(spoilt=lambda selected, item: len(item.tokens) > len(PROMPT))
    outcome = search(runner).run(selected_of(1, DRAFT))
    assert runner.fed == [[(0, 6)], [(0, 4)]]
    assert len(outcome.chosen) == 1


def test_sequence_that_is_never_finite_is_blamed() -> None:
    runner = FailingRunner(spoilt=lambda selected, item: True)
    outcome = search(runner).run(selected_of(1, DRAFT))
    assert [type(why) for _, why in outcome.blamed] == [NotFiniteError]
    assert not outcome.chosen
