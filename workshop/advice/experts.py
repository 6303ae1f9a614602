"""Counts the experts that steps of a mixture read, while the target verifies its own answers."""

from collections.abc import Iterator, Sequence

from outrider.decoding.draft import Draft
from outrider.engine.loop.engine import Engine
from outrider.engine.work import Decode, Decoded
from outrider.pace.experts import ExpertsRead, LearnedExperts
from outrider.pace.step import Step
from workshop.advice.answers import TargetAnswer

DEPTHS = (0, 2, 4)  # tokens of a Draft
ROUNDS = 8  # most rounds for each depth and number of sequences


def counted_experts(target: Engine, answers: Sequence[TargetAnswer]) -> ExpertsRead:
    """Lets the target verify Drafts copied from its own answers, and counts the experts read.

    Returns:
        Experts read by steps over 1, 2, 4, ... sequences; NO_EXPERTS if the steps report none.
    """
    learned, sequences = LearnedExperts(), 1
    while sequences <= len(answers):
        for depth in DEPTHS:
            for step in _steps(target, answers[:sequences], depth):
                learned.observe(step)
        sequences *= 2
    return learned.read


def _steps(target: Engine, answers: Sequence[TargetAnswer], depth: int) -> Iterator[Step]:
    """Yields the steps of rounds over all these answers, until one answer has too few tokens left."""
    runs = [
        (answer, target.open(len(answer.request.prompt), answer.request.noise_key, answer.request.sampling))
        for answer in answers
    ]
    for number in range(ROUNDS):
        if any(len(run.tokens) + depth >= len(answer.text) for answer, run in runs):
            break
        for answer, run in runs:
            base, given = len(run.tokens), () if run.tokens else answer.request.prompt
            end = base + len(given)
            draft = Draft.chain(answer.text[end : end + depth])
            target.submit(Decode(run.number, base, given, draft, number))
        steps: dict[int, Step] = {}
        while target.has_work:
            found = [result.timings.last_step for result in target.step() if isinstance(result, Decoded)]
            steps |= {step.number: step for step in found}
        yield from steps.values()
    for _, run in runs:
        target.close(run)
