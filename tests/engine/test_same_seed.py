"""Same seed, same text: whatever drafts, however deep, in whatever company."""

from collections.abc import Callable
from functools import cache
from itertools import cycle
from typing import Any

import pytest
from tokenizers import Tokenizer

from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO, KINDS, prompts
from outrider.drafters.ngram import NgramIndex
from outrider.drafters.suffix import SuffixIndex
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.index import IndexDrafter
from outrider.engine.offline.speculate import OfflineRequest, Output, generate
from outrider.engine.settings import EngineSettings
from tests.support.near_ties import near_ties

TOKENS = 32
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.2},
    {"temperature": 1.3, "min_p": 0.02, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1.0, "min_tokens": 8, "logit_bias": {5: 2.0}},
)


@cache
def engine(role: str, branches: int = 0) -> Engine:
    settings = EngineSettings(
        model=str(DEMO / role), dtype="float32", threads=1, cache_memory=2**28, draft_ahead=branches
    )
    return Engine.from_settings(settings)


def requests(count: int) -> list[OfflineRequest]:
    """Requests over all kinds of text and settings."""
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    made = []
    for number, settings in zip(range(count), cycle(SETTINGS), strict=False):
        kind, index = KINDS[number // len(SETTINGS) % len(KINDS)], number % 40
        prompt = tuple(tokenizer.encode(prompts(kind, 40)[index]).ids)
        sampling = Sampling(max_tokens=TOKENS, seed=number, **settings)
        made.append(OfflineRequest(prompt, sampling, noise_key(number, 0, prompt)))
    return made


def alone(
    drafter: Drafter | None, asked: list[OfflineRequest], depth: int, alternatives: int
) -> list[Output]:
    return [generate(engine("target"), drafter, [request], depth, alternatives)[0] for request in asked]


def together(
    drafter: Drafter | None, asked: list[OfflineRequest], depth: int, alternatives: int
) -> list[Output]:
    target = engine("target")
    return [
        output
        for start in range(0, len(asked), 32)
        for output in generate(target, drafter, asked[start : start + 32], depth, alternatives)
    ]


Company = Callable[[Drafter | None, list[OfflineRequest], int, int], list[Output]]
MODES: dict[str, tuple[Company, Callable[[], Drafter | None], int, int]] = {
    "plain in a batch": (together, lambda: None, 0, 0),
    "n-gram alone": (alone, lambda: IndexDrafter(NgramIndex), 4, 0),
    "n-gram in a batch": (together, lambda: IndexDrafter(NgramIndex), 3, 0),
    "suffix in a batch": (together, lambda: IndexDrafter(SuffixIndex), 6, 0),
    "tree in a batch": (together, lambda: DraftModel(engine("draft")), 3, 3),
    "tree alone": (alone, lambda: DraftModel(engine("draft")), 4, 8),
    "draft-ahead alone": (alone, lambda: DraftModel(engine("draft", 12)), 4, 0),
    "draft-ahead in a batch": (together, lambda: DraftModel(engine("draft", 64)), 3, 2),
    **{
        f"chain of {depth}": (
            together if depth % 2 else alone,
            lambda: DraftModel(engine("draft")),
            depth,
            0,
        )
        for depth in range(1, 9)
    },
}


MANY_DEPTHS = {f"chain of {depth}" for depth in (2, 3, 5, 6, 7)}  # left to the test of many requests


@cache
def undrafted(count: int) -> list[Output]:
    """Each of the requests alone."""
    return alone(None, requests(count), 0, 0)


def check(count: int, modes: list[str]) -> None:
    asked, reference = requests(count), undrafted(count)
    assert len({output.tokens for output in reference}) > count // 2  # the texts are not all alike
    compared = differing = 0
    for name in modes:
        company, drafter, depth, alternatives = MODES[name]
        answers = company(drafter(), asked, depth, alternatives)
        compared += count
        differing += near_ties(
            asked, *([output.tokens for output in outputs] for outputs in (reference, answers))
        )
        pairs = zip(reference, answers, strict=True)
        assert all(left.finish == right.finish for left, right in pairs if left.tokens == right.tokens)
    assert differing <= max(1, compared // 200)
    print(f"{compared} requests compared, {differing} near-ties")


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in MANY_DEPTHS])
def test_mode_changes_no_token(mode: str) -> None:
    check(6, [mode])


@pytest.mark.slow
def test_no_mode_changes_a_token_over_many_requests() -> None:
    check(48, list(MODES))
    assert 48 * len(MODES) >= 500


def test_drafting_saves_target_passes() -> None:
    asked = requests(6)
    plain = sum(output.target_passes for output in together(None, asked, 0, 1))
    drafted = together(DraftModel(engine("draft")), asked, 4, 1)
    assert sum(output.target_passes for output in drafted) < 0.8 * plain
