"""The pace of all sequences at one target: observations in, depths out. Torch-free.

It combines three parts: costs predict times, the policy turns predictions into depths, and exploration
decides what is tried only to learn from it.
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from outrider.drafters.registry import DrafterInfo
from outrider.pace.acceptance import expected_tokens_by_position
from outrider.pace.costs import RoundTimes, Surveyed, TargetCosts, nothing_surveyed
from outrider.pace.exploration import Budget, Trials
from outrider.pace.policy import best_rate, by_costs, by_thresholds
from outrider.pace.sequence import MEASURED, TRIAL, PacedSequence
from outrider.pace.settings import PaceSettings
from outrider.pace.step import Step
from outrider.pace.tuning import TUNING

logger = logging.getLogger(__name__)


class Pace:
    """Decides the depths of all sequences jointly, after about one new observation per sequence."""

    def __init__(self, settings: PaceSettings, surveyed: Surveyed = nothing_surveyed) -> None:
        self._settings = settings
        self._sequences: list[PacedSequence] = []
        self._running = 0.0  # sequences of all gateways that decode at the target
        self._costs = TargetCosts(surveyed)
        self._trials = Trials()
        self._budget = Budget()
        self._everyone_waits = False  # whether steps wait for the Draft of a trial round
        self._is_trying_plain = False  # whether sequences in rounds try plain decoding
        self._observations = 0  # number since the last decision
        self._in_rounds: Counter[tuple[str, str]] | None = None  # see _in_rounds_like; None: to be counted
        self._decided_for = 0  # number of sequences at the last decision

    @property
    def settings(self) -> PaceSettings:
        """Settings in force."""
        return self._settings

    def use(self, settings: PaceSettings) -> None:
        """Applies new settings, from the next turn of every sequence on."""
        self._settings = settings
        self._decide()

    def join(self, sequence: PacedSequence) -> None:
        """Adds a sequence. It starts with the depth of a similar sequence, if there is any."""
        self._sequences.append(sequence)
        self._in_rounds = None
        self._trials.observe_load(len(self._sequences))
        alike = next((before for before in self._sequences[-2::-1] if before.is_like(sequence)), None)
        if alike is None or len(self._sequences) >= 2 * self._decided_for:
            self._decide()
        else:
            depth = min(alike.depth, sequence.cap(self._settings))
            sequence.decision = replace(sequence.decision, depth=depth, decided_by=alike.decision.decided_by)

    def leave(self, sequence: PacedSequence) -> None:
        """Removes a sequence."""
        self._sequences.remove(sequence)
        self._in_rounds = None

    def observe_target(self, step: Step, running: int) -> None:
        """Learns from a step of the target.

        running: sequences that decode there, whether in this step or not.
        """
        self._running = running
        if self._costs.observe_step(step):
            self._observations += 1
            self._in_rounds = None
            in_rounds = [sequence for sequence in self._sequences if sequence.depth > 0]
            self._is_trying_plain = any(sequence.is_trying for sequence in in_rounds)
            self._trials.observe_step(bool(in_rounds))
            self._everyone_waits = any(map(self._makes_everyone_wait, self._sequences))
            self._budget.earn(step.seconds * len(self._sequences) / self._at_target)

    def observe_drafting(self, sequence: PacedSequence, step: Step) -> None:
        """Learns from a step of the model that makes the sequence's Drafts."""
        self._costs.observe_drafting(sequence.drafter, sequence.worker, step)

    def observe_round(
        self, sequence: PacedSequence, accepted: int, reached: int, times: RoundTimes, further: int = 0
    ) -> None:
        """Learns from a Verdict: ``accepted`` of the ``reached`` positions of the Draft's chain are correct.

        further: correct tokens outside of those positions.
        """
        tokens = 1.0 + accepted + further
        if sequence.depth == 0 and sequence.is_trying:
            if self._makes_everyone_wait(sequence):
                self._spend(times.seconds + times.target_s, tokens)
            sequence.turns.left -= 1
        elif sequence.depth > 0 and sequence.follows_round and sequence.decision.decided_by == MEASURED:
            expected = expected_tokens_by_position(sequence.acceptance.rates()[: times.depth])
            self._costs.compare_round(sequence.drafter.name, times, tokens, expected)
        sequence.acceptance.observe(accepted, reached)
        if sequence.turns.is_probe:
            sequence.turns.is_probe = False
            self._probed(sequence)
        else:
            sequence.acceptance.task.probes.observe(succeeded=True)
        self._observations += 1
        sequence.late_s = None
        in_rounds = self._in_rounds_like(sequence)
        is_first, sequence.follows_round = not sequence.follows_round, True
        self._costs.observe_round(sequence.drafter, sequence.worker, in_rounds, times, is_first=is_first)

    def _in_rounds_like(self, sequence: PacedSequence) -> int:
        """Returns the number of sequences in rounds with the same drafter and the same worker.

        The count is cached for a step, because every sequence of the step asks for it.
        """
        if self._in_rounds is None:
            self._in_rounds = Counter(
                (each.drafter.name, each.worker) for each in self._sequences if each.depth > 0
            )
        return self._in_rounds[sequence.drafter.name, sequence.worker]

    def observe_late(self, sequence: PacedSequence, waited_s: float) -> None:
        """Learns that a Draft did not come within ``waited_s`` seconds."""
        if sequence.depth > 0:
            sequence.late_s = waited_s

    def observe_plain(self, sequence: PacedSequence, seconds: float) -> None:
        """Learns from a token of plain decoding, which came ``seconds`` after the previous token."""
        is_trial = sequence.depth > 0
        if not is_trial and self._everyone_waits:
            self._spend(seconds, 1.0)
        if is_trial and not sequence.is_trying:  # the sequence waits for its Draft
            self._observe_instead_of_round(sequence, seconds)
            return
        sequence.follows_round = False
        if is_trial:
            sequence.turns.left -= 1
        if sequence.decision.decided_by == MEASURED and (is_trial or not self._is_trying_plain):
            self._costs.compare_plain(seconds, len(self._sequences), is_trial)

    @staticmethod
    def _makes_everyone_wait(sequence: PacedSequence) -> bool:
        """Whether all sequences wait for the Draft of a trial round of this sequence."""
        return sequence.depth == 0 and sequence.is_trying and sequence.drafter.waits_in_step

    def _spend(self, seconds: float, tokens: float) -> None:
        """Charges the budget for the time that trial rounds cost; seconds: time of the newest tokens."""
        if rate := self._costs.plain_rate(len(self._sequences)):
            sequences = len(self._sequences)
            self._budget.spend(seconds / sequences - tokens / rate)

    def _observe_instead_of_round(self, sequence: PacedSequence, seconds: float) -> None:
        """Counts a late Draft as a round that gave one token after the wait.

        Otherwise only rounds with a Draft in time would count, and rounds would look faster than they are.
        """
        if sequence.late_s is None or sequence.decision.decided_by != MEASURED:
            return
        expected = expected_tokens_by_position(sequence.acceptance.rates()[: sequence.depth])
        times = RoundTimes(sequence.depth, sequence.late_s, 0.0, seconds)
        self._costs.compare_round(sequence.drafter.name, times, 1.0, expected)
        sequence.late_s = 0.0

    def observe_probe(self, sequence: PacedSequence, accepted: int, reached: int) -> None:
        """Learns from a probe: a guess, made during plain decoding, that the text has judged."""
        sequence.acceptance.observe(accepted, reached)
        self._probed(sequence)

    def _probed(self, sequence: PacedSequence) -> None:
        self._decide()
        if sequence.depth > 0 or sequence.acceptance.is_known:
            sequence.acceptance.task.probes.observe(succeeded=sequence.depth > 0)

    def refresh(self) -> None:
        """Decides again if there are enough new observations. Callers choose a moment when no turn waits.

        While no sequence has Drafts, steps show only the target's costs. These are known, so decisions are
        rarer.
        """
        awaited = len(self._sequences)
        if awaited < TUNING.plain_steps and not any(map(self.may_pay, self._sequences)):
            awaited = TUNING.plain_steps
        if self._observations >= max(awaited, 1):
            self._decide()

    def may_pay(self, sequence: PacedSequence) -> bool:
        """Whether the sequence's next turn should be a round."""
        return self.may_draft(sequence) and (sequence.depth > 0) is not sequence.is_trying

    def may_draft(self, sequence: PacedSequence) -> bool:
        """Whether the settings and the sequence's request allow Drafts."""
        return sequence.cap(self._settings) > 0

    def depth(self, sequence: PacedSequence) -> int:
        """Depth of the sequence's next Draft; 0: plain decoding."""
        return self.depth_in_rounds(sequence) if self.may_pay(sequence) else 0

    def depth_in_rounds(self, sequence: PacedSequence) -> int:
        """Depth of the sequence's rounds; the trial depth if it is in rounds only for a trial."""
        return sequence.depth or min(TUNING.trial_depth, sequence.cap(self._settings))

    def reason(self, sequence: PacedSequence) -> str:
        """Source of the depth of the next Draft: "measured", "thresholds" or "trial"."""
        return TRIAL if sequence.is_trying else sequence.decision.decided_by

    def probe_tokens(self, sequence: PacedSequence) -> int:
        """Tokens of plain decoding until the sequence's drafter guesses again."""
        probes = sequence.acceptance.task.probes
        interval = probes.interval(self._settings, sequence.drafter, len(self._sequences))
        rate = self._costs.plain_rate(len(self._sequences))
        repaid = math.ceil(self._budget.debt_s * rate / len(self._sequences)) if rate else 0
        return max(interval, repaid) if sequence.drafter.probes_by_rounds else interval

    def rate(self, drafter: DrafterInfo, rates: Sequence[float], max_depth: int) -> float:
        """Returns tokens per second of a sequence if all sequences were drafted alike, at the best depth.

        Args:
            rates: acceptance rate of each position, given that it is reached.
            max_depth: limit of the request.

        Returns:
            tokens per second; 0 until the target's costs are known.
        """
        if not self._costs.are_known:
            return 0.0
        workers = [sequence.worker for sequence in self._sequences if sequence.drafter == drafter]
        costs = self._costs.batch([(drafter, worker) for worker in workers or [""]], self._mean_length)
        return best_rate(min(max_depth, self._settings.max_depth), rates, costs, self._at_target)

    def plain_rate(self, sequences: int) -> float | None:
        """Tokens per second of plain decoding for that many of this gateway's sequences; None: not known."""
        return self._costs.plain_rate(sequences)

    @property
    def _mean_length(self) -> float:
        """Mean length of a sequence, in tokens."""
        return sum(sequence.length for sequence in self._sequences) / max(len(self._sequences), 1)

    @property
    def _at_target(self) -> float:
        """Number of sequences at the target, at least 1."""
        return max(self._running, len(self._sequences), 1.0)

    def _decide(self) -> None:
        self._observations, self._decided_for, self._in_rounds = 0, len(self._sequences), None
        self._costs.average_plain(self._at_target, self._mean_length)
        is_measured = self._settings.policy == "measured" and self._costs.are_known
        if is_measured and self._sequences:
            self._decide_by_costs()
        elif not is_measured:
            for sequence in self._sequences:
                sequence.apply(by_thresholds(self._settings, sequence, self._running))
        if plain_tokens := self._trials.begin(self._settings, len(self._sequences), self._budget.debt_s):
            logger.debug("a trial of the other kind of decoding begins, or %d plain tokens", plain_tokens)
            drafting = [sequence for sequence in self._sequences if sequence.depth > 0]
            for sequence in drafting or filter(self.may_draft, self._sequences):
                sequence.turns.try_kind(bool(drafting), plain_tokens)

    def _decide_by_costs(self) -> None:
        sequences = self._sequences
        drafted_by = [(sequence.drafter, sequence.worker) for sequence in sequences]
        scale = max(self._running / len(sequences), 1.0)
        costs = self._costs.batch(drafted_by, self._mean_length)
        decisions, expectation = by_costs(self._settings, sequences, costs, scale)
        self._costs.expected = expectation
        for sequence, decision in zip(sequences, decisions, strict=True):
            sequence.apply(decision)
        logger.debug(
            "depths %s, rounds of %.1f ms, plain steps of %.1f ms",
            [decision.depth for decision in decisions],
            1e3 * expectation.round_s,
            1e3 * expectation.step_s,
        )
