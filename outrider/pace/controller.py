"""The pace of all sequences at one target: observations in, depths out. Torch-free.

It joins three parts: costs predict what things take, the policy turns predictions into depths, and
exploration decides what is tried only to learn from it.
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
    """Decides together for all sequences, again whenever each has reported something new."""

    def __init__(self, settings: PaceSettings, surveyed: Surveyed = nothing_surveyed) -> None:
        self._settings = settings
        self._sequences: list[PacedSequence] = []
        self._running = 0.0  # sequences of all gateways that decode at the target
        self._costs = TargetCosts(surveyed)
        self._trials = Trials()
        self._budget = Budget()
        self._everyone_waits = False  # whether a step waits for the Draft of a round that is only tried
        self._is_trying_plain = False  # whether sequences in rounds try plain decoding
        self._observations = 0  # since the last decision
        self._in_rounds: Counter[tuple[str, str]] | None = None  # see _in_rounds_like; None: to be counted
        self._decided_for = 0  # sequences

    @property
    def settings(self) -> PaceSettings:
        """Settings in force."""
        return self._settings

    def use(self, settings: PaceSettings) -> None:
        """Puts settings in force from the next turn of every sequence on."""
        self._settings = settings
        self._decide()

    def join(self, sequence: PacedSequence) -> None:
        """Counts a sequence in. It gets the depth of a sequence like it, if there is any."""
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
        """Counts a sequence out."""
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
        """Learns from a Verdict on a Draft: accepted of the reached positions of its chain are correct.

        further: correct tokens beside those positions.
        """
        tokens = 1.0 + accepted + further
        if sequence.depth == 0 and sequence.is_trying:
            if self._makes_everyone_wait(sequence):
                self._spend(times.seconds + times.target_s, tokens)
            sequence.turns.left -= 1
        elif sequence.decision.decided_by == MEASURED:
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
        self._costs.observe_round(sequence.drafter, sequence.worker, in_rounds, times)

    def _in_rounds_like(self, sequence: PacedSequence) -> int:
        """Returns the sequences in rounds whose Drafts the same drafter makes at the same worker.

        They are counted once a step: every sequence of the step asks.
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
        """Learns from a token of plain decoding, that many seconds after the token before it."""
        is_trial = sequence.depth > 0
        if not is_trial and self._everyone_waits:
            self._spend(seconds, 1.0)
        if is_trial and not sequence.is_trying:  # the sequence waits for its Draft
            self._observe_instead_of_round(sequence, seconds)
            return
        if is_trial:
            sequence.turns.left -= 1
        if sequence.decision.decided_by == MEASURED and (is_trial or not self._is_trying_plain):
            self._costs.compare_plain(seconds, len(self._sequences), is_trial)

    @staticmethod
    def _makes_everyone_wait(sequence: PacedSequence) -> bool:
        """Whether all sequences wait for the Draft of a round that this sequence only tries."""
        return sequence.depth == 0 and sequence.is_trying and sequence.drafter.waits_in_step

    def _spend(self, seconds: float, tokens: float) -> None:
        """Counts what a sequence lost while rounds were tried; seconds: time of its newest tokens."""
        if rate := self._costs.plain_rate(len(self._sequences)):
            sequences = len(self._sequences)
            self._budget.spend(seconds / sequences - tokens / rate)

    def _observe_instead_of_round(self, sequence: PacedSequence, seconds: float) -> None:
        """Learns what rounds come to if Drafts are late: a token, after a vain wait.

        Otherwise only Drafts in time would count, and rounds would look faster than they are.
        """
        if sequence.late_s is None or sequence.decision.decided_by != MEASURED:
            return
        expected = expected_tokens_by_position(sequence.acceptance.rates()[: sequence.depth])
        times = RoundTimes(sequence.depth, sequence.late_s, 0.0, seconds)
        self._costs.compare_round(sequence.drafter.name, times, 1.0, expected)
        sequence.late_s = 0.0

    def observe_probe(self, sequence: PacedSequence, accepted: int, reached: int) -> None:
        """Learns from a guess that the text has judged, made while the sequence was in plain decoding."""
        sequence.acceptance.observe(accepted, reached)
        self._probed(sequence)

    def _probed(self, sequence: PacedSequence) -> None:
        self._decide()
        if sequence.depth > 0 or sequence.acceptance.is_known:
            sequence.acceptance.task.probes.observe(succeeded=sequence.depth > 0)

    def refresh(self) -> None:
        """Decides again if enough was observed since. A caller chooses a moment when nothing waits.

        While no sequence has Drafts, steps show only the target's costs, which are known.
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
        """Depth while the sequence is in rounds; the trial depth if it is there only for a trial."""
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
        """Tokens per second of a sequence, if all at the target were drafted alike, as deep as pays.

        Args:
            rates: acceptance rate of each position, given that it is reached.
            max_depth: the request's own cap.

        Returns:
            0 until the target's costs are known.
        """
        if not self._costs.are_known:
            return 0.0
        workers = [sequence.worker for sequence in self._sequences if sequence.drafter == drafter]
        costs = self._costs.batch([(drafter, worker) for worker in workers or [""]], self._mean_length)
        return best_rate(min(max_depth, self._settings.max_depth), rates, costs, self._at_target)

    def plain_rate(self, sequences: int) -> float | None:
        """Tokens per second that plain decoding would give that many of our sequences; None: not known."""
        return self._costs.plain_rate(sequences)

    @property
    def _mean_length(self) -> float:
        """Tokens of a sequence."""
        return sum(sequence.length for sequence in self._sequences) / max(len(self._sequences), 1)

    @property
    def _at_target(self) -> float:
        """Sequences at the target, at least 1."""
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
