"""Measures the effect of a change with common random numbers; old answers are Drafts of the new answers.

Both runs use the seed of each item and ``noise_scope: seed``. So a token differs only if the change moves its
distribution far enough, and most of the noise cancels in the difference of the scores.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist, fmean, median, variance
from typing import Any

from workshop.checking.at_once import Progress, all_of
from workshop.checking.deployment import Deployment, EvaluatedAnswer
from workshop.checking.items import EvaluationItem, read_items
from workshop.checking.settings import CheckSettings, Score

SCORES: dict[Score, Callable[[EvaluatedAnswer, EvaluationItem], float]] = {
    "length": lambda answer, _: len(answer.tokens),
    "exact": lambda answer, item: answer.text.strip() == str(item.expected).strip(),
    "contains": lambda answer, item: str(item.expected) in answer.text,
}


@dataclass(frozen=True)
class RunCost:
    """Cost of one run over all items."""

    name: str
    seconds: float
    target_passes: int
    tokens: int


@dataclass(frozen=True)
class FirstDifference:
    """First token at which the two answers to an item differ."""

    item: int  # from 0
    position: int  # in the answer, from 0


@dataclass(frozen=True)
class Paired:
    """Comparison of the same items before and after a change."""

    items: int
    score: Score
    mean_a: float
    mean_b: float
    interval: tuple[float, float]  # confidence interval of the difference of the means
    variance: float  # variance of an item's difference
    independent_variance: float  # variance of an item's difference if B uses other seeds
    runs: tuple[RunCost, ...]
    accepted_predictions: int  # tokens of A's answers that are in B's answers
    rejected_predictions: int  # tokens of A's answers that are not in B's answers
    differences: tuple[FirstDifference, ...]
    other_than_fresh: int | None  # answers of B that differ in another run of B without A's answers
    reasons: tuple[str, ...]

    @property
    def difference(self) -> float:
        """Effect of the change: the mean score at B minus the mean score at A."""
        return self.mean_b - self.mean_a

    @property
    def share_of_items(self) -> float | None:
        """Items needed for an equally narrow interval, relative to the items needed with independent seeds.

        None if independent seeds show no variance.
        """
        return self.variance / self.independent_variance if self.independent_variance else None

    @property
    def median_position(self) -> float | None:
        """Median position of the first differences; None if all answers are identical."""
        return median(each.position for each in self.differences) if self.differences else None


class _Runs:
    """Runs over all items, one after the other."""

    def __init__(self, items: Sequence[EvaluationItem], settings: CheckSettings, progress: Progress) -> None:
        self._items, self._settings, self._progress = items, settings, progress
        self.costs: list[RunCost] = []

    async def of_a(self, a: Deployment) -> list[EvaluatedAnswer]:
        return await self._run("run A", a, lambda number: {"prompt": self._items[number].prompt})

    async def of_b(
        self, name: str, b: Deployment, earlier: Sequence[EvaluatedAnswer] | None = None, seed: int = 0
    ) -> list[EvaluatedAnswer]:
        """Returns the answers after the change.

        Args:
            earlier: answers that serve as predictions, one for each item; None: no predictions.
            seed: number that is added to the seed of each item.
        """

        def fields(number: int) -> dict[str, Any]:
            item, more = self._items[number], dict[str, Any]()
            if earlier is not None:
                more["prediction"] = {"type": "content", "content": earlier[number].text}
            return {"prompt": item.prompt, **more, **item.changed}

        return await self._run(name, b, fields, seed)

    async def _run(
        self, name: str, side: Deployment, fields: Callable[[int], dict[str, Any]], seed: int = 0
    ) -> list[EvaluatedAnswer]:
        settings = self._settings

        async def answered(number: int) -> EvaluatedAnswer:
            shared = {"max_tokens": settings.answer_tokens, "temperature": settings.temperature}
            noise = {"seed": settings.seed + seed + number, "noise_scope": "seed"}
            return await side.answer(**{**shared, **noise, **fields(number)})

        started = time.monotonic()
        jobs = [answered] * len(self._items)
        answers = await all_of(name, jobs, settings.concurrency, self._progress)
        seconds, passes = time.monotonic() - started, sum(answer.target_passes for answer in answers)
        tokens = sum(len(answer.tokens) for answer in answers)
        self.costs.append(RunCost(name, seconds, passes, tokens))
        return answers


async def paired(a: Deployment, b: Deployment, settings: CheckSettings, progress: Progress) -> Paired:
    """Runs the items before and after the change. Raises CheckError."""
    assert settings.paired is not None
    items = read_items(settings.paired, needs_expected=settings.score != "length")
    runs = _Runs(items, settings, progress)
    before = await runs.of_a(a)
    after = await runs.of_b("run B", b, before)
    fresh = await runs.of_b("run B afresh", b) if settings.fresh else None
    independent = await runs.of_b("run B with other seeds", b, seed=len(items))
    score = SCORES[settings.score]
    of_a, of_b, of_others = (
        [float(score(answer, item)) for answer, item in zip(answers, items, strict=True)]
        for answers in (before, after, independent)
    )
    moved = [right - left for left, right in zip(of_a, of_b, strict=True)]
    spread = variance(moved)
    half = NormalDist().inv_cdf(1 - settings.false_alarm / 2) * sqrt(spread / len(items))
    low, high = fmean(moved) - half, fmean(moved) + half
    reasons = []
    if low > 0.0 or high < 0.0:
        reasons.append(f"{settings.score} moves by {fmean(moved):.3g}, between {low:.3g} and {high:.3g}")
    return Paired(
        items=len(items),
        score=settings.score,
        mean_a=fmean(of_a),
        mean_b=fmean(of_b),
        interval=(low, high),
        variance=spread,
        independent_variance=variance(right - left for left, right in zip(of_a, of_others, strict=True)),
        runs=tuple(runs.costs),
        accepted_predictions=sum(answer.accepted_predictions for answer in after),
        rejected_predictions=sum(answer.rejected_predictions for answer in after),
        differences=tuple(_differences(before, after)),
        other_than_fresh=None if fresh is None else len(_differences(fresh, after)),
        reasons=tuple(reasons),
    )


def _differences(
    before: Sequence[EvaluatedAnswer], after: Sequence[EvaluatedAnswer]
) -> list[FirstDifference]:
    """Returns the first differences; identical answers have none."""
    found = []
    for item, (left, right) in enumerate(zip(before, after, strict=True)):
        if left.tokens != right.tokens:
            pairs = enumerate(zip(left.tokens, right.tokens, strict=False))
            shorter = min(len(left.tokens), len(right.tokens))
            position = next((place for place, (one, other) in pairs if one != other), shorter)
            found.append(FirstDifference(item, position))
    return found
