"""Expected speed of rounds relative to plain decoding, computed from costs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from outrider.drafters.registry import DrafterInfo, Place
from outrider.pace.optimizer import Mix, round_seconds
from outrider.pace.regression import Vector
from workshop.advice.judged import Counts
from workshop.advice.steps import StepTimes

FASTER = 10.0  # ratio of a target step's time to a draft step's time that a draft should exceed
MIN_ACCEPTANCE = 0.5  # acceptance rate below which a draft is not worth its device


@dataclass(frozen=True)
class ExpectedCosts:
    """Costs in the form that the pace uses (outrider/pace/optimizer.py), before anything was served."""

    target: StepTimes
    drafter: DrafterInfo
    draft: StepTimes | None  # None: the drafter has no model
    round_s: float  # seconds of a round beside the steps of draft and target; unused for a target drafter
    hidden: float  # share of drafting that draft-ahead hides behind a step of the target
    asked_share: float = 1.0  # share of rounds that ask the model
    calibration: float = 1.0
    plain_factor: float = 1.0

    @property
    def draft_in_step(self) -> bool:
        """Whether the drafter runs in the target's process."""
        return self.drafter.place is Place.TARGET_WORKER

    def step(self, sequences: Vector, tokens: Vector) -> Vector:
        """Returns the seconds of a step of the target; 0 without sequences."""
        return np.asarray(self.target.seconds(float(sequences), float(tokens)) if sequences else 0.0)

    def drafting(
        self, sequences: Vector, depth: Vector, leaves: Vector | float, target_step: Vector
    ) -> Vector:
        """Returns the seconds from a Verdict to the next Draft, which is a chain."""
        # With a target drafter, a round does not wait for the gateway.
        rest = 0.0 if self.draft_in_step else self.round_s
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
    """Prices in dollars an hour; None: not given."""

    target: float | None
    draft: float | None  # price of a draft's own device

    def per_million_tokens(self, tokens_per_s: float, *, with_draft: bool) -> float | None:
        """Returns dollars per million tokens. A draft without a price shares the target's device."""
        if self.target is None:
            return None
        hourly = self.target + (self.draft or 0.0 if with_draft else 0.0)
        return hourly / 3600.0 / tokens_per_s * 1e6


@dataclass(frozen=True)
class Expected:
    """Expected speed at the best depth for a number of streams."""

    streams: int
    depth: int  # 0: plain decoding is at least as fast
    tokens_per_pass: float
    tokens_per_s: float  # tokens per second, all streams together
    speedup: float  # relative to plain decoding


def expected(by_depth: Mapping[int, Counts], costs: ExpectedCosts, streams: int) -> Expected:
    """Returns the speed at the fastest depth, plain decoding included.

    by_depth: counts of rounds by depth.
    """
    plain = Expected(streams, 0, 1.0, streams / costs.target.seconds(streams, streams), 1.0)
    drafted = (expected_at(counts, costs, streams) for counts in by_depth.values() if counts.rounds)
    return max([plain, *drafted], key=lambda found: found.tokens_per_s)


def expected_at(counts: Counts, costs: ExpectedCosts, streams: int) -> Expected:
    """Returns the speed of rounds of one depth. ``counts`` has at least one round."""
    rate = streams * counts.tokens_per_pass / round_time(counts, costs, streams)
    speedup = rate / (streams / costs.target.seconds(streams, streams))
    return Expected(streams, counts.depth, counts.tokens_per_pass, rate, speedup)


def could_pay(costs: ExpectedCosts, depth: int, streams: int) -> bool:
    """Whether any depth up to this depth would beat plain decoding if every guess were correct."""
    correct = (Counts(each, rounds=1, tokens=each + 1, asked=1, drafted=each) for each in range(1, depth + 1))
    return any(expected_at(counts, costs, streams).speedup > 1.0 for counts in correct)


def round_time(counts: Counts, costs: ExpectedCosts, streams: int) -> float:
    """Returns seconds from Verdict to Verdict if all sequences are in rounds of that depth."""
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
