"""Paces of a gateway: each begins with what the workers of its target have timed before they served."""

from dataclasses import replace

from gateway.routing.paces import Paces
from gateway.settings import Speculation
from gateway.workers.streams import WorkerInfo
from outrider.drafters.registry import drafter
from outrider.pace.settings import PaceSettings
from outrider.pace.step import Step, StepSize

STEPS = [StepSize(count, count * tokens) for count in (1, 2, 4, 8) for tokens in (1, 1, 5, 5)]
TARGET = WorkerInfo("target", "m", "fast:1", 1, "node", vocab_size=100, max_length=100)


def steps_of(seconds: float) -> tuple[Step, ...]:
    return tuple(Step(number, size, seconds) for number, size in enumerate(STEPS, 1))


FAST = replace(TARGET, survey={"": steps_of(5e-3)})
SLOW = replace(TARGET, address="slow:1", survey={"": steps_of(40e-3)})
UNSURVEYED = replace(TARGET, address="old:1")
DRAFT = replace(TARGET, role="draft", draft="model", address="draft:1", survey={"": steps_of(6e-3)})


def depth_at(address: str) -> tuple[int, str]:
    paces = Paces(PaceSettings(), lambda: [FAST, SLOW, UNSURVEYED, DRAFT])
    speculation = Speculation().resolved("model", paces.settings)
    paced = paces.sequence(drafter("model"), speculation, None, "interactive")
    pace = paces.of_target(address)
    pace.join(paced)
    return pace.depth(paced), pace.reason(paced)


def test_pace_of_a_slow_target_begins_with_drafts_and_that_of_a_fast_target_without() -> None:
    """A step of the draft takes longer than a step of the fast target."""
    assert depth_at("fast:1") == (0, "measured")
    depth, reason = depth_at("slow:1")
    assert depth > 0
    assert reason == "measured"


def test_pace_learns_the_costs_of_a_draft_on_the_targets_gpu_from_rounds_alone() -> None:
    """Its steps take longer beside the target than they took alone."""
    target, draft = (replace(worker, gpus=("0",)) for worker in (FAST, DRAFT))
    elsewhere = replace(draft, node="another")

    def depth(*workers: WorkerInfo) -> int:
        paces = Paces(PaceSettings(), lambda: workers)
        speculation = Speculation().resolved("model", paces.settings)
        paced = paces.sequence(drafter("model"), speculation, None, "interactive")
        pace = paces.of_target("fast:1")
        pace.join(paced)
        return pace.depth(paced)

    assert depth(target, draft) > 0
    assert depth(target, elsewhere) == 0


def test_pace_of_a_target_without_survey_begins_with_the_fixed_rules() -> None:
    assert depth_at("old:1") == (PaceSettings().threshold_depth, "thresholds")


def test_pace_of_a_target_drafter_begins_with_the_targets_own_survey_of_it() -> None:
    beside = replace(SLOW, survey={**SLOW.survey, "eagle3": steps_of(60e-3)})
    paces = Paces(PaceSettings(), lambda: [beside])
    speculation = Speculation().resolved("eagle3", paces.settings)
    paced = paces.sequence(drafter("eagle3"), speculation, None, "interactive")
    pace = paces.of_target("slow:1")
    pace.join(paced)
    assert pace.depth(paced) == 0
