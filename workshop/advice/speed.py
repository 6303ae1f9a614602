"""What rounds bring beside plain decoding, by what they cost. Arithmetic alone."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from outrider.drafters.registry import DrafterInfo, Place
from outrider.pace.optimizer import Mix, Vector, round_seconds
from workshop.advice.judged import Counts
from workshop.advice.steps import StepTimes

FASTER = 10.0  # times that a draft's step should be faster than the target's
LEAST_ACCEPTANCE = 0.5  # below it a draft is left alone


@dataclass(frozen=True)
class ExpectedCosts:
    """As the pace has them (outrider/pace/optimizer.py), before anything was served."""

    target: StepTimes
    drafter: DrafterInfo
    draft: StepTimes | None  # None: guesses take no model
    round_s: float  # beside the steps of draft and target, of rounds that wait for the gateway
    hidden: float  # share of drafting that draft-ahead hides, of what a step of the target could hide
    asked_share: float = 1.0  # of the rounds, for which the model is asked
    calibration: float = 1.0

    @property
    def are_beside_target(self) -> bool:
        """As the pace has it."""
        return self.drafter.place is Place.TARGET_WORKER

    def step(self, sequences: Vector, tokens: Vector) -> Vector:
        """Of the target; one without sequences is none."""
        return np.asarray(self.target.seconds(float(sequences), float(tokens)) if sequences else 0.0)

    def drafting(
        self, sequences: Vector, depth: Vector, leaves: Vector | float, target_step: Vector
    ) -> Vector:
        """From a Verdict to the next Verify; Drafts are chains."""
        # A target goes on by itself with the Drafts that are made beside it.
        rest = 0.0 if self.are_beside_target else self.round_s
        alone = rest + self.asked_share * self._drafting_steps(float(sequences), float(depth))
        return np.asarray(alone - self.hidden * np.minimum(alone, target_step))

    def _drafting_steps(self, sequences: float, depth: float) -> float:
        if self.draft is None:
            return 0.0
        steps = self.drafter.steps_per_draft + depth * self.drafter.steps_per_token
        positions = depth if self.drafter.is_parallel else 1.0
        return steps * self.draft.seconds(sequences, sequences * positions)


@dataclass(frozen=True)
class Prices:
    """Dollars an hour; None: not told."""

    target: float | None
    draft: float | None  # of a device of its own

    def per_million_tokens(self, tokens_per_s: float, *, with_draft: bool) -> float | None:
        """Dollars; a draft without a price is on the target's device."""
        if self.target is None:
            return None
        hourly = self.target + (self.draft or 0.0 if with_draft else 0.0)
        return hourly / 3600.0 / tokens_per_s * 1e6


@dataclass(frozen=True)
class Expected:
    """At so many streams, with the depth that is best there."""

    streams: int
    depth: int  # 0: plain decoding is as fast
    tokens_per_pass: float
    tokens_per_s: float  # of all streams together
    speedup: float  # to plain decoding


def expected(by_depth: Mapping[int, Counts], costs: ExpectedCosts, streams: int) -> Expected:
    """The best of all depths, plain decoding included.

    by_depth: rounds as they were counted.
    """
    plain = Expected(streams, 0, 1.0, streams / costs.target.seconds(streams, streams), 1.0)
    drafted = (expected_at(counts, costs, streams) for counts in by_depth.values() if counts.rounds)
    return max([plain, *drafted], key=lambda found: found.tokens_per_s)


def expected_at(counts: Counts, costs: ExpectedCosts, streams: int) -> Expected:
    """Of rounds of one depth, at least one of which was counted."""
    rate = streams * counts.tokens_per_pass / round_time(counts, costs, streams)
    speedup = rate / (streams / costs.target.seconds(streams, streams))
    return Expected(streams, counts.depth, counts.tokens_per_pass, rate, speedup)


def could_pay(costs: ExpectedCosts, depth: int, streams: int) -> bool:
    """Whether rounds of any depth up to this would be faster than plain decoding, were all guesses right."""
    right = (Counts(each, rounds=1, tokens=each + 1, asked=1, drafted=each) for each in range(1, depth + 1))
    return any(expected_at(counts, costs, streams).speedup > 1.0 for counts in right)


def round_time(counts: Counts, costs: ExpectedCosts, streams: int) -> float:
    """Seconds from Verdict to Verdict where all are in rounds of that depth."""
    mix = Mix(
        plain=np.zeros(()),
        rounds=np.asarray(float(streams)),
        drafted=np.asarray(streams * counts.drafted / counts.rounds),
        log_tokens=np.zeros(()),
        log_overrun=np.zeros(()),
        depth=np.asarray(float(counts.depth)),
    )
    seconds, _ = round_seconds(mix, replace(costs, asked_share=counts.asked_share))
    return float(seconds)
