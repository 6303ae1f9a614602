"""The survey: an engine times its steps before it serves, and is then as if it had not."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from outrider.decoding.settings import Sampling
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.survey import LONGEST_S, MODEL, Survey, survey
from outrider.engine.settings import EngineSettings
from outrider.engine.work import plain_decoding
from outrider.pace.costs import TargetCosts
from tests.support.checkpoints import write_checkpoint
from tests.support.eagle3 import write_eagle3
from tests.support.engine_runs import run, texts
from tests.support.target_drafters import engine_with

SEEDED = Sampling(temperature=1, max_tokens=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def engine_of(folder: Path, **settings: Any) -> Engine:
    given: dict[str, Any] = {"block_size": 4, "cache_memory": 2**24, "max_sequences": 8}
    return Engine.from_settings(EngineSettings(model=str(folder), **given | settings))


def sizes(found: Survey, name: str = MODEL) -> set[tuple[float, float]]:
    """Returns the sequences and tokens of steps after the prompts."""
    with_prompts = {
        step.size.sequences: step for step in reversed(found[MODEL])
    }.values()  # each size begins so
    steps = [step for step in found[name] if step not in with_prompts]
    return {(step.size.sequences, step.size.tokens) for step in steps}


def answers(engine: Engine) -> list[list[int]]:
    sequences = [engine.open(3, noise_key, SEEDED) for noise_key in range(3)]
    for sequence in sequences:
        engine.submit(plain_decoding(sequence.number, 0, (5, 6, 7), SEEDED.max_tokens))
    return texts(run(engine), sequences)


def test_survey_of_target_times_plain_decoding_and_rounds_of_each_size(folder):
    found = survey(engine_of(folder))
    assert sizes(found) == {(count, count * tokens) for count in (1, 2, 4, 8) for tokens in (1, 5)}


def test_survey_of_target_makes_costs_known_before_any_request(folder):
    found = survey(engine_of(folder))
    assert TargetCosts(lambda name: found.get(name, ())).are_known
    assert not TargetCosts().are_known


def test_survey_of_target_with_drafter_times_its_drafts_too(tmp_path):
    found = survey(engine_with("eagle3", write_eagle3(tmp_path), max_sequences=4))
    assert sizes(found, "eagle3") == {(1, 1), (2, 2), (4, 4)}
    assert all(step.seconds > 0.0 for step in found["eagle3"])


def test_survey_of_draft_times_drafts_and_no_verification(folder):
    found = survey(engine_of(folder, is_draft=True))
    assert sizes(found) == {(count, count) for count in (1, 2, 4, 8)}


@pytest.mark.parametrize("is_draft", [False, True])
def test_survey_is_over_without_sequences_cache_or_work(folder, is_draft):
    engine = engine_of(folder, is_draft=is_draft)
    before = engine.load()
    survey(engine)
    assert engine.load() == before
    assert not engine.has_work


def test_engine_after_survey_gives_the_texts_that_it_gave_before(folder):
    surveyed = engine_of(folder)
    survey(surveyed)
    assert answers(surveyed) == answers(engine_of(folder))


@pytest.mark.parametrize(
    ("small", "most"),
    [({"max_sequences": 1}, 1), ({"cache_memory": 2**16}, 4), ({"cache_memory": 2**15}, 2)],
    ids=["sequences", "21 blocks", "10 blocks"],
)
def test_survey_of_small_engine_times_what_fits(folder, small: Mapping[str, object], most: int):
    """A sequence takes five blocks."""
    found = survey(engine_of(folder, **small))
    assert max(sequences for sequences, _ in sizes(found)) == most


def test_survey_of_engine_with_too_short_sequences_is_empty(folder):
    engine = engine_of(folder, cache_memory=2**13)
    assert engine.max_length < 16
    assert survey(engine) == {}


@pytest.mark.slow
def test_survey_of_slow_engine_ends_with_the_size_at_which_its_time_is_over(folder):
    found = survey(engine_of(folder, shortest_step_s=LONGEST_S / 4))
    assert sizes(found) == {(1, 1), (1, 5)}


def test_survey_with_step_that_fails_is_empty_and_leaves_the_engine_well(folder, monkeypatch, caplog):
    engine = engine_of(folder)
    steps = iter([RuntimeError("this pass alone")])
    whole = type(engine.runner).run

    def failing(self: Any, *given: Any, **named: Any) -> Any:
        if (error := next(steps, None)) is not None:
            raise error
        return whole(self, *given, **named)

    monkeypatch.setattr(type(engine.runner), "run", failing)
    assert survey(engine) == {}
    assert "begins without costs" in caplog.text
    assert answers(engine) == answers(engine_of(folder))
