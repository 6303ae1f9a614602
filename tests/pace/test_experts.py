"""How many of a mixture's experts a step reads, and how that is learned from steps."""

import itertools
import math
import random

import pytest

from outrider.pace.experts import NO_EXPERTS, ExpertsRead, LearnedExperts
from outrider.pace.step import Step, StepSize

INDEPENDENT = ExpertsRead.independent(8 / 128)
# A further token of a sequence counts for half of an independent token, and a further sequence for 0.8.
ALIKE = ExpertsRead(0.2 * INDEPENDENT.of_token, 0.3 * INDEPENDENT.of_token, 0.5 * INDEPENDENT.of_token)
SIZES = [(sequences, each) for sequences in (1, 2, 4, 8) for each in (1, 5)]


def taught(read: ExpertsRead, sizes: list[tuple[int, int]], noise: float = 0.0) -> ExpertsRead:
    learned, drawn = LearnedExperts(), random.Random(0)
    for number, (sequences, each) in enumerate(sizes * 20, 1):
        share = float(read.share(sequences, sequences * each)) * drawn.uniform(1 - noise, 1 + noise)
        learned.observe(Step(number, StepSize(sequences, sequences * each), 1e-3, min(share, 1.0)))
    return learned.read


@pytest.mark.parametrize(("tokens", "different"), [(1, 8), (2, 15.5), (5, 35.3), (9, 56.4)])
def test_share_of_independent_tokens_is_the_expected_number_of_different_experts(tokens, different):
    assert 128 * INDEPENDENT.share(1, tokens) == pytest.approx(different, abs=0.1)
    assert INDEPENDENT.share(tokens, tokens) == INDEPENDENT.share(1, tokens)


@pytest.mark.parametrize("read", [INDEPENDENT, ALIKE], ids=["independent", "alike"])
def test_share_is_learned_for_sizes_that_no_step_had(read):
    found = taught(read, SIZES, noise=0.1)
    for sequences, each in itertools.product((1, 3, 16, 64), (1, 2, 3, 9)):
        tokens = sequences * each
        assert found.share(sequences, tokens) == pytest.approx(float(read.share(sequences, tokens)), rel=0.05)


def test_share_after_steps_of_one_size_alone_is_that_of_independent_tokens():
    found = taught(INDEPENDENT, [(1, 1)])
    assert found.share(1, 1) == pytest.approx(8 / 128)
    assert found.share(1, 5) == pytest.approx(float(INDEPENDENT.share(1, 5)), rel=0.01)


@pytest.mark.parametrize(
    "step",
    [
        Step(1, StepSize(1, 1), 1e-3),  # nothing was counted
        Step(1, StepSize(1, 1, prompt_tokens=64), 1e-3, 0.5),
        Step(1, StepSize(64, 64), 1e-3, 0.99),  # one expert more or less would change much
        Step(1, StepSize(64, 64), 1e-3, 1.5),  # experts of several passes
    ],
    ids=["not counted", "prompt", "nearly all", "several passes"],
)
def test_step_that_tells_little_of_a_token_teaches_nothing(step):
    learned = LearnedExperts()
    learned.observe(step)
    assert learned.read == NO_EXPERTS
    assert learned.read.share(1, 100) == 0.0


def test_model_whose_tokens_choose_all_experts_reads_all_of_them():
    assert math.isclose(ExpertsRead.independent(1.0).share(1, 1), 1.0, abs_tol=1e-8)
