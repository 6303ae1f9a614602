"""The drafters that ship for the demo target: small, with a card, and right as often as it says."""

from functools import cache
from pathlib import Path

import pytest

from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, Output, generate
from outrider.engine.settings import EngineSettings
from tests.support.demo_pair import DRAFTERS, engine, prompt_of
from tests.support.target_drafters import KINDS, TOKENS, drafted_texts, engine_with, plain_texts

DEPTH = 4
# Accepted tokens per round: under what was measured, and over what the same weights bring in a wrong place.
MIN_ACCEPTED = {"early_exit": 1.5, "eagle3": 2.0, "dflash": 2.0, "medusa": 0.45, "parallel": 0.9}
NAMES = sorted(MIN_ACCEPTED)
HEADS = ["early_exit", "eagle3", "dflash", "medusa"]


@cache
def target_with(head: str) -> Engine:
    return engine_with(head, DRAFTERS / head, {"layers": 3} if head == "early_exit" else {})


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_heads_give_the_text_of_plain_decoding(head: str, temperature: float) -> None:
    found = drafted_texts(target_with(head), temperature, DEPTH, company=6)
    assert [text.tokens for text in found] == plain_texts(temperature)


@pytest.mark.parametrize("head", HEADS)
def test_head_is_right_as_often_as_its_card_says(head: str) -> None:
    found = drafted_texts(target_with(head), 0.7, DEPTH, company=6)
    accepted, rounds = sum(text.accepted for text in found), sum(text.rounds for text in found)
    assert accepted >= MIN_ACCEPTED[head] * rounds


def parallel_outputs(temperature: float) -> list[Output]:
    settings = {"model": str(DRAFTERS / "parallel"), "dtype": "float32", "threads": 1, "cache_memory": 2**24}
    draft = Engine.from_settings(EngineSettings.model_validate(settings))
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, temperature=temperature)
    prompts = [prompt_of(kind) for kind in KINDS]
    asked = [OfflineRequest(prompt, sampling, noise_key(1, 0, prompt)) for prompt in prompts]
    return generate(engine("target"), DraftModel(draft), asked, DEPTH)


def test_parallel_draft_changes_no_text_and_is_right_as_often_as_its_card_says() -> None:
    found = parallel_outputs(0.7)
    assert [output.tokens for output in found] == plain_texts(0.7)
    accepted, passes = sum(output.accepted for output in found), sum(output.target_passes for output in found)
    assert accepted >= MIN_ACCEPTED["parallel"] * passes


@pytest.mark.parametrize("name", NAMES)
def test_drafter_has_a_card_with_its_recipe(name: str) -> None:
    card = (DRAFTERS / name / "README.md").read_text()
    assert f"python -m workshop.training {name}" in card


def test_shipped_weights_take_at_most_twenty_megabytes() -> None:
    files = [file for folder in (DEMO, DRAFTERS) for file in Path(folder).rglob("*") if file.is_file()]
    assert {file.parent.name for file in files if file.parent.parent == DRAFTERS} == {*NAMES}
    assert sum(file.stat().st_size for file in files) <= 20_000_000
