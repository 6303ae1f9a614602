"""What is foretold of the demo draft is what the running service then gives."""

import httpx
import pytest

from outrider.demo.prompts import KINDS, prompts
from outrider.engine.colocated.draft_model import DraftModel
from tests.support.demo_pair import engine, prompt_of
from workshop.advice.answers import Prompt, answered
from workshop.advice.judged import counted
from workshop.advice.judging import judge_text

DEPTH, TOKENS, SEED, NEAR = 4, 48, 5, 0.05
PROMPTS = 3  # prompts of each kind


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_advised_tokens_per_pass_are_near_those_of_the_service(
    client: httpx.Client, temperature: float
) -> None:
    given = [Prompt(kind, prompt_of(kind, index)) for kind in KINDS for index in range(PROMPTS)]
    answers = answered(engine("target"), given, temperature, TOKENS, SEED)
    counts = counted(judge_text(DraftModel(engine("draft")), answers, DEPTH), DEPTH)
    tokens = passes = 0
    for answer, text in zip(
        answers, (prompt for kind in KINDS for prompt in prompts(kind, PROMPTS)), strict=True
    ):
        asked = {
            "prompt": text,
            "max_tokens": TOKENS,
            "temperature": temperature,
            "seed": SEED,
            "speculation": {"mode": "fixed", "depth": DEPTH},
        }
        response = client.post("/v1/completions", json=asked)
        usage = response.raise_for_status().json()["usage"]
        assert usage["completion_tokens"] == len(answer.tokens)
        tokens += usage["completion_tokens"] - 1
        passes += usage["speculation"]["target_passes"] - 1
    assert counts.tokens_per_pass == pytest.approx(tokens / passes, rel=NEAR)
