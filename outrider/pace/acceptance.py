"""Acceptance rates of drafted tokens: per task and position, and per sequence. Torch-free."""

import math
from collections.abc import Sequence
from math import prod

import numpy as np

from outrider.learning.mean import Rate, kept
from outrider.pace.exploration import Probes
from outrider.pace.settings import MAX_DEPTH
from outrider.pace.tuning import TUNING

RATE_ERROR = 1e-6  # largest error of the rate that ``least_rate`` returns


class TaskAcceptance:
    """Acceptance rate of each position, accepted / reached, over one task's latest rounds."""

    def __init__(self, memory: float = TUNING.task_memory) -> None:
        """memory: rounds after which a round weighs 1/e."""
        self._kept = kept(memory)  # factor by which a round lowers the weight of earlier rounds
        self._accepted = np.zeros(MAX_DEPTH)  # rounds in which a position was accepted
        self._reached = np.zeros(MAX_DEPTH)  # rounds in which a position was reached
        self._rates: tuple[float, ...] | None = None  # cache; None after a round
        self._second = Rate(memory)  # correct second guesses / wrong first guesses
        self._spread = Rate(memory)  # product of two surpluses of one sequence / pairs of tokens
        self.probes = Probes()  # probes of its sequences in plain decoding

    def observe_rank(self, rank: int) -> None:
        """Learns that the target's token was the drafter's guess of that rank; 0 is the first guess."""
        if rank:
            self._second.observe(rank == 1)

    @property
    def hit_rate(self) -> float:
        """Rate at which the second guess is correct if the first is wrong; 0 until it is known."""
        return self._second.value(0.0) if self._second.total >= TUNING.known_rounds else 0.0

    def observe(self, accepted: int, reached: int) -> None:
        """Learns from a round, in which all reached positions were correct, or all but the last."""
        self._accepted *= self._kept
        self._accepted[:accepted] += 1.0
        self._reached *= self._kept
        self._reached[:reached] += 1.0
        self._rates = None

    def observe_spread(self, before: float, before_tokens: float, surplus: float, tokens: int) -> None:
        """Learns how far sequences of the task differ, from a sequence's surplus before and in a round.

        The errors of the two surpluses are independent. So their mean product is the variance of the true
        offsets.

        Args:
            before: mean surplus of ``before_tokens`` earlier tokens of the sequence.
            surplus: accepted tokens of the round, minus the number that the task's rates predict.
            tokens: tokens that the round reached.
        """
        self._spread.observe(before * before_tokens * surplus, before_tokens * tokens)

    @property
    def credibility_tokens(self) -> float:
        """Tokens at which a sequence's mean surplus has weight 1/2: variance of a token / of offsets.

        This is the weight of the best linear estimate. Source: Bühlmann, "Experience rating and credibility",
        1967.
        """
        rate = self.rates()[0]
        of_token = rate * (1.0 - rate)
        spread = self._spread.value(of_token / TUNING.least_credibility_tokens, TUNING.credibility_pairs)
        tokens = of_token / max(spread, TUNING.smallest)
        return min(max(tokens, TUNING.least_credibility_tokens), TUNING.most_credibility_tokens)

    def rates(self) -> tuple[float, ...]:
        """Returns [MAX_DEPTH] acceptance rates; an unmeasured position gets the rate of its predecessor."""
        if self._rates is None:
            rates, rate = [], TUNING.prior_rate
            weight = TUNING.prior_rounds
            for accepted, reached in zip(self._accepted.tolist(), self._reached.tolist(), strict=True):
                rate = (accepted + weight * rate) / (reached + weight)
                rates.append(rate)
            self._rates = tuple(rates)
        return self._rates

    @property
    def samples(self) -> float:
        """Effective number of rounds behind the first position's rate; older rounds count less."""
        return float(self._reached[0])

    @property
    def is_known(self) -> bool:
        """Whether enough rounds were seen to trust the first position's rate."""
        if self.samples < TUNING.known_rounds:
            return False
        rate = float(self._accepted[0] / self._reached[0])
        return math.sqrt(rate * (1.0 - rate) / self.samples) <= TUNING.known_error


class SequenceAcceptance:
    """Acceptance rates of one sequence: the rates of its task, plus an offset equal at all positions."""

    def __init__(self, task: TaskAcceptance) -> None:
        self.task = task
        self._accepted = Rate(TUNING.sequence_memory)  # accepted / reached tokens
        self._surplus = Rate(TUNING.sequence_memory)  # (accepted - expected by its task) / reached tokens

    def observe(self, accepted: int, reached: int) -> None:
        """Learns from a round, and passes it on to the task."""
        rates = self.task.rates()
        self._accepted.observe(accepted, reached)
        surplus = accepted - sum(rates[:reached])
        self.task.observe_spread(self._surplus.value(0.0), self._surplus.total, surplus, reached)
        self._surplus.observe(surplus, reached)
        self.task.observe(accepted, reached)

    @property
    def is_known(self) -> bool:
        return self.task.is_known

    def rates(self) -> list[float]:
        """Returns [MAX_DEPTH] acceptance rates, given that the position is reached."""
        offset = self._surplus.value(0.0, self.task.credibility_tokens)
        return [min(max(rate + offset, 0.0), 1.0) for rate in self.task.rates()]

    @property
    def overall_rate(self) -> float:
        """Accepted / reached over all positions, with the task's first rate as the prior."""
        return self._accepted.value(self.task.rates()[0], TUNING.known_rounds)


def expected_tokens(acceptance_rate: float, depth: int) -> float:
    """Returns tokens per round, the target's own included, of a chain with a uniform acceptance rate.

    (1 - a^(K + 1)) / (1 - a), and K + 1 at a = 1. Source: Leviathan et al., "Fast inference from transformers
    via speculative decoding", 2023, equation 1.

    Raises:
        ValueError: the rate is not within [0, 1] or the depth is negative.
    """
    if depth < 0:
        raise ValueError(f"depth={depth} must be at least 0")
    return expected_tokens_by_position([acceptance_rate] * depth)


def least_rate(tokens: float, depth: int) -> float | None:
    """Returns the least acceptance rate at which a chain gives ``tokens`` per round; None: no rate does.

    Args:
        tokens: tokens per round, the target's own included.
        depth: tokens of the chain.
    """
    if tokens > depth + 1:
        return None
    low, high = 0.0, 1.0
    while high - low > RATE_ERROR:
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, depth) < tokens else (low, middle)
    return high


def expected_tokens_by_position(acceptance_rates: Sequence[float]) -> float:
    """Returns tokens per round, the target's own included, of a chain with these rates: 1 + a + a b + ...

    Raises:
        ValueError: a rate is not within [0, 1].
    """
    for rate in acceptance_rates:
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"acceptance rate {rate} must be within [0, 1]")
    return 1.0 + sum(prod(acceptance_rates[:reached]) for reached in range(1, len(acceptance_rates) + 1))
