"""Task drafters: an engine drafts with the class that its row names."""

from dataclasses import replace

import pytest

from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO
from outrider.drafters import registry
from outrider.engine.draft_ahead.task_drafter import InOnePass, TaskDrafter
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from outrider.engine.tasks.propose import Assignment, ProposeTask, SampledProposeTask
from outrider.engine.work import Propose, Proposed
from tests.support.demo_pair import prompt_of


class Sampled(TaskDrafter):
    """Drafts every Draft as for rejection sampling."""

    def coupled(self, given: Assignment) -> ProposeTask:
        return self.sampled(given)

    def sampled(self, given: Assignment) -> ProposeTask:
        return SampledProposeTask(given)


@pytest.mark.parametrize(("names_class", "carries_probs"), [(False, False), (True, True)])
def test_engine_drafts_with_the_class_that_its_row_names(
    monkeypatch: pytest.MonkeyPatch, names_class: bool, carries_probs: bool
) -> None:
    if names_class:
        row = replace(registry.drafter("model"), implementation=f"{__name__}:Sampled")
        monkeypatch.setattr(registry, "_ROWS", {**registry._ROWS, "model": row})
    settings = EngineSettings(
        model=str(DEMO / "draft"), dtype="float32", threads=1, cache_memory=2**26, draft_ahead=4
    )
    engine, prompt = Engine.from_settings(settings), prompt_of("code")
    sequence = engine.open(len(prompt), 1, Sampling(max_tokens=8, temperature=1.0, ignore_eos=True))
    engine.submit(Propose(sequence.number, 0, tuple(prompt), 3, 0))
    results = []
    while engine.has_work:
        results += engine.step()
    proposed = results[0]
    assert isinstance(proposed, Proposed)
    assert len(proposed.draft) == 3
    assert bool(proposed.draft.draft_probs) is carries_probs


def test_in_one_pass_without_a_mask_token_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="names no pard_token"):
        InOnePass(None)
