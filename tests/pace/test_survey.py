"""A pace that begins with surveyed costs: steps that workers have timed before they served."""

from collections.abc import Callable

import numpy as np
import pytest

from outrider.drafters import registry
from outrider.pace.acceptance import SequenceAcceptance, TaskAcceptance
from outrider.pace.controller import Pace
from outrider.pace.drafter_cost import DrafterCosts
from outrider.pace.sequence import PacedSequence
from outrider.pace.settings import PaceSettings
from outrider.pace.step import Step, StepSize


def surveyed(target_s: float, draft_s: float) -> Callable[[str], list[Step]]:
    """Returns the steps of workers whose steps take that long, whatever their size."""
    counts = [(count, tokens) for count in (1, 2, 4, 8) for tokens in (1, 1, 5, 5)]
    seconds = {"": target_s, "model": draft_s}

    def steps(name: str) -> list[Step]:
        sizes = [StepSize(count, count * tokens) for count, tokens in counts]
        return [Step(number, size, seconds[name]) for number, size in enumerate(sizes, 1)]

    return steps


@pytest.mark.parametrize(("draft_s", "drafts"), [(1e-3, True), (50e-3, False)])
def test_pace_with_surveyed_costs_decides_by_them_before_any_step(draft_s, drafts):
    pace = Pace(PaceSettings(), surveyed(20e-3, draft_s))
    sequence = PacedSequence(registry.drafter("model"), SequenceAcceptance(TaskAcceptance()), max_depth=8)
    pace.join(sequence)
    assert sequence.decision.decided_by == "measured"
    assert (pace.depth(sequence) > 0) is drafts


def test_pace_without_surveyed_costs_begins_with_the_fixed_rules():
    pace = Pace(PaceSettings())
    sequence = PacedSequence(registry.drafter("model"), SequenceAcceptance(TaskAcceptance()), max_depth=8)
    pace.join(sequence)
    assert sequence.decision.decided_by == "thresholds"
    assert pace.depth(sequence) == PaceSettings().threshold_depth


def test_drafter_cost_of_a_surveyed_worker_goes_on_to_learn_from_another_workers_steps():
    costs = DrafterCosts(registry.drafter("model"), surveyed(20e-3, 1e-3)("model"))
    alone = np.ones(())
    before = float(costs.at("a").seconds(alone, alone, alone * 0, alone * 0))
    for number in range(1, 100):  # a worker that was started anew counts from 1
        costs.at("a").step.observe(Step(number, StepSize(1, 1), 4e-3))
    assert float(costs.at("a").seconds(alone, alone, alone * 0, alone * 0)) > 2 * before
