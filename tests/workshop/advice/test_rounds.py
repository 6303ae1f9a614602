"""What is foretold of a draft is what the gateway's rounds then give, with draft-ahead and over real gRPC."""

import pytest

from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.offline.speculate import OfflineRequest
from tests.support.demo_pair import engine, prompt_of
from tests.support.pair import FIXED, TOKENS, answer, expected, pair
from workshop.advice.answers import TargetAnswer
from workshop.advice.judged import counted
from workshop.advice.judging import judge_text

KINDS = ("code", "json", "question_answer")
DEPTH, NEAR = 4, 0.05


def answer_to(kind: str, temperature: float) -> TargetAnswer:
    prompt = prompt_of(kind)
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, temperature=temperature)
    request = OfflineRequest(prompt, sampling, noise_key(1, 0, prompt))
    return TargetAnswer(kind, request, tuple(expected(kind, temperature)))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_judged_tokens_per_pass_are_near_those_of_rounds(temperature: float) -> None:
    assert FIXED.depth == DEPTH
    answers = [answer_to(kind, temperature) for kind in KINDS]
    counts = counted(judge_text(DraftModel(engine("draft")), answers, DEPTH), DEPTH)
    tokens = passes = 0
    async with pair(branches=12) as fleet:
        for recorded in answers:
            text, stats = await answer(fleet, recorded.task, temperature)
            assert tuple(text) == recorded.tokens
            tokens += len(text) - 1
            passes += stats.target_passes - 1
    assert counts.tokens_per_pass == pytest.approx(tokens / passes, rel=NEAR)
