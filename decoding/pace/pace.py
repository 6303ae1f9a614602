"""The pace of all sequences at one target: observations in, depths out."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decoding.pace.acceptance import SequenceAcceptance
from decoding.pace.cost import RoundCost, StepCost, StepSize
from decoding.pace.depths import Vector, best_depths, mix_of, round_seconds
from decoding.pace.expected import expected_tokens_by_position
from decoding.pace.settings import PaceSettings
from decoding.pace.thresholds import threshold_depth

TRIAL_DEPTH = 2  # of a round that only shows what rounds cost
FIRST_TRIAL = 16  # steps after which the first trial is due
PROBE_DEPTH = 4  # of a guess that is compared with what the target said
LONGEST_PROBE = 4  # times probe_tokens between two guesses, reached by doubling
OBSERVED_SHARE = 4  # a decision stands until one in so many sequences has reported
STRETCH_FORGETTING, LARGEST_STRETCH = 0.02, 3.0
SLACK = 4.0  # times that a Draft may take as long as expected before it is late


class PacedSequence:
    """One sequence under a Pace: its depth, and what is known of its Drafts."""

    def __init__(
        self, drafter: str, acceptance: SequenceAcceptance, max_depth: int, is_batch: bool = False
    ) -> None:
        """max_depth: the request's own cap."""
        self.drafter = drafter
        self.acceptance = acceptance
        self.max_depth = max_depth
        self.is_batch = is_batch
        self.length = 0  # tokens, prompt included
        self.depth = max_depth  # as last decided; a new one counts as drafting
        self.failed_probes = 0  # in a row
        self.has_trial = False  # its next turn is to be of the other kind, to see what that costs

    def probe_tokens(self, settings: PaceSettings) -> int:
        """Plain tokens until the drafter is to guess again: more after every guess that changed nothing."""
        return settings.probe_tokens * min(1 << self.failed_probes, LONGEST_PROBE)


@dataclass
class DrafterCost:
    """What one drafter takes, apart from the target."""

    step: StepCost
    round: RoundCost

    def seconds(self, sequences: Vector, depth: int) -> Vector:
        """From a Verdict to the next Verify; a sequence waits half a step for the draft's own batch."""
        if depth == 0:
            return np.zeros_like(sequences)
        step = self.step.seconds(sequences, sequences) if self.step.is_known else 0.0
        return self.round.seconds(sequences) + (depth + 0.5) * step


class Pace:
    """Decides together for all sequences, and again whenever enough was observed since.

    Until costs and acceptance are known, and under policy "thresholds", the fixed rules decide.
    """

    def __init__(self, settings: PaceSettings) -> None:
        self.settings = settings  # may be replaced at any time
        self._sequences: list[PacedSequence] = []
        self._target = StepCost()
        self._drafters: dict[str, DrafterCost] = {}
        self._running = 0.0  # sequences that decode at the target, those of other gateways too
        # Steps of one kind since there was one of the other: verifying Drafts, or decoding.
        self._uniform_steps = float(settings.trial_steps - FIRST_TRIAL)
        self._had_drafts = False
        self._expected_s = 0.0  # of a round, as last decided; 0 where there are none
        self._stretch = 1.0  # rounds' seconds over expected ones, mean
        self._observations = 0  # since the last decision

    def join(self, sequence: PacedSequence) -> None:
        self._sequences.append(sequence)
        self._observations = len(self._sequences)

    def leave(self, sequence: PacedSequence) -> None:
        self._sequences.remove(sequence)

    def observe_target(self, size: StepSize, seconds: float, running: int, verified: bool) -> None:
        """A step of the target, as each of its sequences reports it.

        Args:
            running: sequences that decode there, whether in this step or not.
            verified: whether the sequence that reports had a Draft in it.
        """
        self._target.observe(size, seconds)
        self._running = running
        if verified is self._had_drafts:
            self._uniform_steps += 1.0 / max(size.sequences, 1.0)
        else:
            self._uniform_steps, self._had_drafts = 0.0, verified
        self._observations += 1

    def observe_drafting(self, drafter: str, size: StepSize, seconds: float) -> None:
        """A step of the draft, as each of its sequences reports it."""
        self._cost_of(drafter).step.observe(size, seconds)

    def observe_round(
        self, sequence: PacedSequence, accepted: int, verified: int, overhead_s: float, total_s: float
    ) -> None:
        """A Verdict on a Draft.

        Args:
            overhead_s: spent neither in the draft worker nor in the target.
            total_s: from asking for the Draft to the Verdict.
        """
        sequence.acceptance.observe(accepted, verified)
        if self._expected_s > 0.0:
            off = min(max(total_s / self._expected_s, 1.0 / LARGEST_STRETCH), LARGEST_STRETCH)
            self._stretch += STRETCH_FORGETTING * (off - self._stretch)
        sequence.failed_probes = 0
        in_rounds = sum(other.depth > 0 for other in self._sequences)
        self._cost_of(sequence.drafter).round.observe(in_rounds, overhead_s)

    def observe_probe(self, sequence: PacedSequence, accepted: int, verified: int) -> None:
        """A guess that was made while the sequence was plain, compared with what the target said."""
        sequence.acceptance.observe(accepted, verified)
        self._decide()
        sequence.failed_probes += sequence.depth == 0

    def depth(self, sequence: PacedSequence) -> int:
        """Of its next Draft; 0 for plain decoding."""
        if self._observations * OBSERVED_SHARE >= len(self._sequences):
            self._decide()
        if sequence.has_trial:
            sequence.has_trial = False
            return 0 if sequence.depth else min(TRIAL_DEPTH, self._cap(sequence))
        return sequence.depth

    def patience_s(self, sequence: PacedSequence, depth: int) -> float | None:
        """How long to wait for a Draft; None while nothing is known.

        As long as plain decoding would need for the tokens that the round should bring, but never so short
        that a Draft which is slow by chance is given up.
        """
        drafter = self._drafters.get(sequence.drafter)
        if drafter is None or not (self._target.is_known and drafter.step.is_known):
            return None
        others = max(self._running - 1.0, 0.0)
        plain, verify = self._target.seconds(others + 1.0, [others + 1.0, others + 1.0 + depth])
        worth = expected_tokens_by_position(sequence.acceptance.rates()[:depth]) * plain - verify
        usual = float(drafter.seconds(np.array(max(self._running, 1.0)), depth))
        return max(float(worth), SLACK * usual)

    def _cost_of(self, drafter: str) -> DrafterCost:
        return self._drafters.setdefault(drafter, DrafterCost(StepCost(), RoundCost()))

    def _cap(self, sequence: PacedSequence) -> int:
        return min(sequence.max_depth, self.settings.max_depth)

    def _decide(self) -> None:
        self._observations = 0
        measured: list[PacedSequence] = []
        for sequence in self._sequences:
            if self._is_measured(sequence):
                measured.append(sequence)
            else:
                rate = sequence.acceptance.overall_rate
                fixed = threshold_depth(self.settings, rate, self._running, sequence.depth > 0)
                sequence.depth = min(fixed, self._cap(sequence))
        if measured:
            self._allot(measured)
        if self.settings.policy == "measured" and self._uniform_steps >= self.settings.trial_steps:
            self._uniform_steps = 0.0
            for sequence in self._sequences:
                sequence.has_trial = True

    def _is_measured(self, sequence: PacedSequence) -> bool:
        return self.settings.policy == "measured" and self._target.is_known and sequence.acceptance.is_known

    def _allot(self, sequences: list[PacedSequence]) -> None:
        reach = np.array([self._reach(sequence) for sequence in sequences])
        is_batch = np.array([sequence.is_batch for sequence in sequences])
        scale = max(self._running / len(self._sequences), 1.0)
        context = sum(sequence.length for sequence in sequences) / len(sequences)
        drafters = [self._cost_of(name) for name in _names(sequences)]
        costs = _Costs(self._target, drafters, context, self._stretch)
        depths = best_depths(reach, is_batch, costs, scale)
        mix, deepest = mix_of(depths, reach, scale), int(depths.max())
        self._expected_s = float(round_seconds(mix, deepest, costs)[0]) if deepest else 0.0
        for sequence, depth in zip(sequences, depths, strict=True):
            sequence.depth = int(depth)

    def _reach(self, sequence: PacedSequence) -> NDArray[np.float64]:
        """[MAX_DEPTH]"""
        reach = np.cumprod(sequence.acceptance.rates())
        sign = 1.0 if sequence.depth > 0 else -1.0
        reach *= 1.0 + sign * self.settings.hysteresis
        reach[self._cap(sequence) :] = 0.0
        return np.asarray(np.minimum(reach, 1.0))


@dataclass(frozen=True)
class _Costs:
    """Costs at the batch's mean context, drafted by the slowest of the drafters in use."""

    target: StepCost
    drafters: list[DrafterCost]
    context: float  # tokens per sequence
    stretch: float

    def step(self, sequences: Vector, tokens: Vector) -> Vector:
        return self.target.seconds(sequences, tokens, self.context * sequences)

    def drafting(self, sequences: Vector, depth: int) -> Vector:
        return np.asarray(np.max([drafter.seconds(sequences, depth) for drafter in self.drafters], axis=0))


def _names(sequences: Iterable[PacedSequence]) -> set[str]:
    return {sequence.drafter for sequence in sequences}
