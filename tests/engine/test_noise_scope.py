"""Which answers share noise: under the scope "seed" all, under "prompt" those to equal prompts."""

from typing import Any

import pytest

from outrider.decoding.settings import NoiseScope, Sampling
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.offline.speculate import OfflineRequest, Output, generate
from tests.support.demo_pair import engine, prompt_of

PROMPTS = [prompt_of("code"), prompt_of("prose", 1), prompt_of("json")[:3]]
COUNT = 24
# So warm that the noise alone decides, whatever the prompt says.
COUPLED: dict[str, Any] = {"temperature": 100.0}
# These rules walk along the probabilities: with two tokens a small change seldom moves the choice.
WALKED: dict[str, Any] = {"temperature": 100.0, "allowed_token_ids": (70, 80)}


def answers(scope: NoiseScope, drafter: Drafter | None = None, **settings: Any) -> list[Output]:
    sampling = Sampling(max_tokens=COUNT, ignore_eos=True, noise_scope=scope, **settings)
    asked = [OfflineRequest(prompt, sampling, noise_key=5) for prompt in PROMPTS]
    return generate(engine("target"), drafter, asked, 4)


def agreement(scope: NoiseScope, **settings: Any) -> float:
    """Share of the places at which the answers to all prompts have the same token."""
    texts = [answer.tokens for answer in answers(scope, **settings)]
    return sum(len({*tokens}) == 1 for tokens in zip(*texts, strict=True)) / COUNT


@pytest.mark.parametrize(
    "settings",
    [COUPLED, *({**WALKED, "verification": rule} for rule in ("rejection", "block"))],
    ids=["coupled", "rejection", "block"],
)
def test_prompts_of_several_lengths_share_noise_with_the_scope_seed_alone(settings: dict[str, Any]) -> None:
    assert len({len(prompt) for prompt in PROMPTS}) == len(PROMPTS)
    assert agreement("seed", **settings) > 0.9
    assert agreement("prompt", **settings) < 0.6


def test_drafter_shares_the_noise_of_its_target() -> None:
    plain = [answer.tokens for answer in answers("seed", **COUPLED)]
    drafted = answers("seed", DraftModel(engine("draft")), **COUPLED)
    assert [answer.tokens for answer in drafted] == plain
    # The draft knows another distribution: it is the noise that makes its guesses correct.
    assert all(answer.accepted > 0.8 * answer.drafted for answer in drafted)
