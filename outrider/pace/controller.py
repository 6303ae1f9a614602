"""The pace of all sequences at one target: observations in, depths out."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.drafters.registry import DrafterInfo, Place, Width
from outrider.pace.acceptance import SequenceAcceptance
from outrider.pace.calibration import Calibration
from outrider.pace.costs import DrafterCost, DrafterCosts, StepCost
from outrider.pace.expected import expected_tokens_by_position
from outrider.pace.optimizer import Mix, Vector, best_depths, best_leaves, log_rate, mix_of, round_seconds
from outrider.pace.settings import PaceSettings
from outrider.pace.step import Step
from outrider.pace.thresholds import threshold_depth

TRIAL_DEPTH = 2  # of a round that only shows what rounds cost
TRIAL_ROUNDS = 3  # in a row: before the first nothing could be foreseen
PLAIN_TRIAL = 64  # steps between trials of plain decoding for each token that one has
FIRST_TRIAL = 16  # steps to the first trial, and to another when the load has doubled; then twice as many
PROBE_DEPTH = 4  # of a guess that is compared with what the target said
DOUBLINGS = 2  # of the tokens between two guesses, one after each that changed nothing
PLAIN_STEPS = 8  # after which it is decided anew where nobody drafts
PROBERS, MANY_PROBERS = 8, 64  # sequences from which on each guesses less often, and to which
THRESHOLDS, MEASURED, TRIAL = "thresholds", "measured", "trial"  # why a depth is what it is
PUBLISHED_S = 10.0  # seconds of steps over which the published time of plain decoding is averaged
SLACK = 4.0  # times that a Draft may take as long as expected before it is late


class PacedSequence:
    """One sequence under a Pace: its depth, and what is known of its Drafts."""

    def __init__(
        self, drafter: DrafterInfo, acceptance: SequenceAcceptance, max_depth: int, is_batch: bool = False
    ) -> None:
        """max_depth: the request's own cap."""
        self.drafter = drafter
        self.acceptance = acceptance
        self.max_depth = max_depth
        self.is_batch = is_batch
        self.worker = ""  # that makes its Drafts, by address; empty: none has yet, or the drafter has none
        self.length = 0  # tokens, prompt included
        self.depth = max_depth  # as last decided; a new one counts as drafting
        self.decided_by = THRESHOLDS  # what the depth comes from: that or MEASURED
        self.leaves = 0  # runners-up beside its chain, as last decided
        self.patience_s = math.inf  # for a Draft: beyond it plain decoding is faster
        self.trial_turns = 0  # of the other kind, that are to come next, to see what that costs
        self.is_probed = False  # by the round that comes next, since no text can tell

    def try_round(self) -> None:
        """Has a round come next though plain decoding is faster: only that tells how good its Drafts are."""
        if self.depth == 0:
            self.trial_turns = max(self.trial_turns, 1)
            self.is_probed = True

    def go_on(self, depth: int, decided_by: str, leaves: int = 0, patience_s: float = math.inf) -> None:
        """As decided. What was to be tried may be what comes now anyway."""
        if (depth > 0) is not (self.depth > 0):
            self.trial_turns = 0
        self.depth, self.decided_by, self.leaves, self.patience_s = depth, decided_by, leaves, patience_s

    def is_like(self, other: "PacedSequence") -> bool:
        """Whether as much is known of both, as long as one of them is new."""
        mine, theirs = self.acceptance.task, other.acceptance.task
        return mine is theirs and (self.drafter, self.is_batch) == (other.drafter, other.is_batch)


class Pace:
    """Decides together for all sequences, again whenever each has told something new.

    Until costs and acceptance are known, and under policy "thresholds", the fixed rules decide.
    """

    def __init__(self, settings: PaceSettings) -> None:
        self._settings = settings
        self._sequences: list[PacedSequence] = []
        self._target = StepCost()
        self._newest_step_s = 0.0  # of the target
        self._drafters: dict[str, DrafterCosts] = {}
        self._running = 0.0  # sequences that decode at the target, those of other gateways too
        # Steps of one kind since there was one of the other: verifying Drafts, or decoding.
        self._uniform_steps = 0.0
        self._trial_after = FIRST_TRIAL  # of them; what is measured first is not to be believed for long
        self._had_drafts = False
        self._tried_with = 1  # sequences at the last trial; twice as many call for another
        self._calibration = Calibration()
        # As last decided, by the costs: seconds of rounds, of a token of plain decoding or of its trial.
        self._expected_s: dict[bool, float] = {}
        self._counts = Counter[str]()  # sequences in rounds by drafter, as last decided
        self._plain_s: float | None = None  # seconds of a step of plain decoding, averaged; None: not known
        self._averaged_s = self._busy_s = 0.0  # seconds of steps that are in it, and since then
        self._observations = 0  # since the last decision
        self._decided_for = 0  # sequences

    @property
    def settings(self) -> PaceSettings:
        """In force."""
        return self._settings

    def use(self, settings: PaceSettings) -> None:
        """In force from the next turn of every sequence on."""
        self._settings = settings
        self._decide()

    def join(self, sequence: PacedSequence) -> None:
        self._sequences.append(sequence)
        if len(self._sequences) >= 2 * self._tried_with:
            self._uniform_steps = max(self._uniform_steps, self._trial_after - FIRST_TRIAL)
            self._tried_with = len(self._sequences)
        alike = next((other for other in self._sequences[-2::-1] if other.is_like(sequence)), None)
        if alike is None or len(self._sequences) >= 2 * self._decided_for:
            self._decide()
        else:
            sequence.depth = min(alike.depth, self._cap(sequence))  # until the next decision
            sequence.decided_by = alike.decided_by

    def leave(self, sequence: PacedSequence) -> None:
        self._sequences.remove(sequence)

    def observe_target(self, step: Step, running: int) -> None:
        """A step of the target.

        running: sequences that decode there, whether in this step or not.
        """
        self._running, self._newest_step_s = running, step.seconds
        if self._target.observe(step):
            self._observations += 1
            self._busy_s += step.seconds
            had_drafts = step.size.tokens > step.size.sequences
            self._uniform_steps = self._uniform_steps + 1.0 if had_drafts is self._had_drafts else 0.0
            self._had_drafts = had_drafts
            self._calibration.stepped(self._counts.keys() if had_drafts else ())

    def observe_drafting(self, sequence: PacedSequence, step: Step) -> None:
        """A step of the model that makes its Drafts."""
        self._cost_of(sequence.drafter, sequence.worker).step.observe(step)

    def observe_round(
        self,
        sequence: PacedSequence,
        accepted: int,
        verified: int,
        depth: int,
        seconds: float,
        overhead_s: float,
        target_s: float,
        ahead_hit: bool | None = None,
    ) -> None:
        """A Verdict on a Draft.

        Args:
            depth: guesses in the Draft's chain.
            seconds: of the round, in which the target did not work on it.
            overhead_s: of these, spent outside of the drafter too.
            target_s: of the round, in which the target had it, in a step or waiting for one.
            ahead_hit: whether the Draft was prepared before the Verdict that it follows; None: none was.
        """
        if sequence.depth == 0 and sequence.trial_turns:
            sequence.trial_turns -= 1
        elif sequence.decided_by == MEASURED:
            name, count = sequence.drafter.name, max(self._counts[sequence.drafter.name], 1)
            self._calibration.observe_round(name, depth, seconds + target_s, self._expected_s[True], count)
            expected = expected_tokens_by_position(sequence.acceptance.rates()[:depth])
            self._calibration.observe_tokens(name, 1.0 + accepted, expected, count)
        sequence.acceptance.observe(accepted, verified)
        if sequence.is_probed:
            sequence.is_probed = False
            self._probed(sequence)
        else:
            sequence.acceptance.task.failed_probes = 0
        self._observations += 1
        in_rounds = sum(
            other.depth > 0 and other.worker == sequence.worker and other.drafter == sequence.drafter
            for other in self._sequences
        )
        cost = self._cost_of(sequence.drafter, sequence.worker)
        if not ahead_hit:
            cost.round.observe(in_rounds, overhead_s)
        if ahead_hit is not None:
            cost.observe_ahead(in_rounds, depth, seconds, self._newest_step_s, ahead_hit)

    def observe_plain(self, sequence: PacedSequence, seconds: float) -> None:
        """A token of plain decoding, so long after the one before it."""
        is_trial = sequence.depth > 0
        if is_trial and not sequence.trial_turns:
            return  # its Draft is on the way
        if is_trial:
            sequence.trial_turns -= 1
        plain = len(self._sequences) - self._counts.total()  # below 0 where some have left since
        if sequence.decided_by != MEASURED or (is_trial and plain > 0):
            return
        count = len(self._sequences) if is_trial else max(plain, 1)
        self._calibration.observe_plain(seconds, self._expected_s[False], count, is_trial=is_trial)

    def observe_rank(self, sequence: PacedSequence, rank: int) -> None:
        """The target's token, after those that stand, was the draft's guess of that rank; 0 is the first."""
        sequence.acceptance.task.observe_rank(rank)

    def observe_probe(self, sequence: PacedSequence, accepted: int, verified: int) -> None:
        """A guess that was made while the sequence was plain, compared with what the target said."""
        sequence.acceptance.observe(accepted, verified)
        self._probed(sequence)

    def _probed(self, sequence: PacedSequence) -> None:
        task = sequence.acceptance.task
        self._decide()
        if sequence.depth > 0:
            task.failed_probes = 0
        elif task.is_known:
            task.failed_probes += 1

    def refresh(self) -> None:
        """Decides again if enough was observed since: to be called where nobody waits for it.

        While nobody drafts, steps tell only what the target costs, which is known.
        """
        is_drafting = any(self.may_pay(sequence) for sequence in self._sequences)
        if self._observations >= max(len(self._sequences), 1 if is_drafting else PLAIN_STEPS):
            self._decide()

    def may_pay(self, sequence: PacedSequence) -> bool:
        """Whether its next turn should be a round."""
        return self.may_draft(sequence) and (sequence.depth > 0) is not (sequence.trial_turns > 0)

    def may_draft(self, sequence: PacedSequence) -> bool:
        """Whether the settings and its request leave it any depth."""
        return self._cap(sequence) > 0

    def depth(self, sequence: PacedSequence) -> int:
        """Of its next Draft; 0 for plain decoding."""
        return self.depth_in_rounds(sequence) if self.may_pay(sequence) else 0

    def depth_in_rounds(self, sequence: PacedSequence) -> int:
        """As long as it has rounds: of a trial, if it has them for that alone."""
        return sequence.depth or min(TRIAL_DEPTH, self._cap(sequence))

    def reason(self, sequence: PacedSequence) -> str:
        """What the depth of its next Draft comes from: "measured", "thresholds" or "trial"."""
        return TRIAL if sequence.trial_turns else sequence.decided_by

    def rate(self, drafter: DrafterInfo, rates: Sequence[float], max_depth: int) -> float:
        """Tokens per second of a sequence, if all at the target were drafted alike, as deep as pays.

        Args:
            rates: of acceptance at each position, given that it is reached.
            max_depth: the request's own cap.

        Returns:
            0 until the target's costs are known.
        """
        if not self._target.is_known:
            return 0.0
        depths = np.arange(min(max_depth, self._settings.max_depth) + 1)
        running = max(self._running, len(self._sequences), 1.0)
        workers = [sequence.worker for sequence in self._sequences if sequence.drafter == drafter]
        costs = self._costs([(drafter, worker) for worker in workers or [""]], self._mean_length())
        in_rounds = np.where(depths > 0, running, 0.0)
        tokens = np.cumsum([1.0, *np.cumprod(rates)])[depths]
        mix = Mix(
            plain=running - in_rounds,
            rounds=in_rounds,
            drafted=np.asarray(running * depths, np.float64),
            log_tokens=running * np.log(tokens),
            log_overrun=in_rounds * np.log(costs.calibration[0, depths - 1]),
            depth=depths.astype(np.float64),
        )
        return float(np.exp(log_rate(mix, costs).max()))

    def _mean_length(self) -> float:
        """Tokens of a sequence."""
        return sum(sequence.length for sequence in self._sequences) / max(len(self._sequences), 1)

    def plain_rate(self, sequences: int) -> float | None:
        """Tokens per second that plain decoding would give so many of ours; None as long as it is not known.

        The time of a step is averaged over the last ``PUBLISHED_S`` of steps: one fit swings with the few
        steps that it is drawn from.
        """
        if not sequences:
            return 0.0
        return None if self._plain_s is None else sequences / self._plain_s

    def _average_plain(self) -> None:
        """Takes what a step of plain decoding would cost now into the average."""
        running = max(self._running, len(self._sequences), 1.0)
        seconds = self._target.measured(running, self._mean_length() * running)
        if seconds is None:
            return
        self._averaged_s += self._busy_s
        newest = max(self._busy_s / self._averaged_s, -math.expm1(-self._busy_s / PUBLISHED_S))
        self._busy_s = 0.0
        before = seconds if self._plain_s is None else self._plain_s
        self._plain_s = before * (seconds / before) ** newest

    def probe_tokens(self, sequence: PacedSequence) -> int:
        """Plain tokens until its drafter is to guess again.

        More after every guess in a row that changed nothing, whichever of the task's sequences it was for,
        and where many guess: together they tell as much. A guess is not free where the draft shares a
        processor with others: for a new sequence it takes the whole prompt in. Beside the target all
        sequences of a step wait for one that guesses, so there one does at a time.
        """
        many = min(len(self._sequences), MANY_PROBERS)
        if sequence.drafter.place is not Place.TARGET_WORKER:
            many //= PROBERS
        doublings = min(sequence.acceptance.task.failed_probes, DOUBLINGS)
        return self._settings.probe_tokens * max(many, 1) << doublings

    def _cost_of(self, drafter: DrafterInfo, worker: str) -> DrafterCost:
        if drafter.name not in self._drafters:
            self._drafters[drafter.name] = DrafterCosts(drafter)
        return self._drafters[drafter.name].of(worker)

    def _cap(self, sequence: PacedSequence) -> int:
        return min(sequence.max_depth, self._settings.max_depth)

    def _decide(self) -> None:
        self._observations, self._decided_for = 0, len(self._sequences)
        if self._busy_s:
            self._average_plain()
        measured: list[PacedSequence] = []
        for sequence in self._sequences:
            if self._is_measured(sequence):
                measured.append(sequence)
            else:
                fixed = threshold_depth(
                    self._settings,
                    self._rate_for_thresholds(sequence),
                    self._running,
                    is_drafting=sequence.depth > 0,
                    is_batch=sequence.is_batch,
                )
                sequence.go_on(min(fixed, self._cap(sequence)), THRESHOLDS)
        if measured:
            self._allot(measured)
        trial_after = min(self._trial_after, self._settings.trial_steps)
        if self._settings.policy == "measured" and self._uniform_steps >= trial_after:
            self._uniform_steps = 0.0
            self._trial_after = min(2 * trial_after, self._settings.trial_steps)
            self._tried_with = len(self._sequences)
            tokens = max(trial_after // PLAIN_TRIAL, 1)
            for sequence in filter(self.may_draft, self._sequences):
                sequence.trial_turns = TRIAL_ROUNDS if sequence.depth == 0 else tokens

    def _rate_for_thresholds(self, sequence: PacedSequence) -> float:
        """Of acceptance; all is taken to be right until it is known: then costs can say what pays."""
        is_known = self._settings.policy == "thresholds" or sequence.acceptance.is_known
        return sequence.acceptance.overall_rate if is_known else 1.0

    def _is_measured(self, sequence: PacedSequence) -> bool:
        return self._settings.policy == "measured" and self._target.is_known and sequence.acceptance.is_known

    def _allot(self, sequences: list[PacedSequence]) -> None:
        reach = self._reach(sequences)
        is_batch = np.array([sequence.is_batch for sequence in sequences])
        scale = max(self._running / len(self._sequences), 1.0)
        context = sum(sequence.length for sequence in sequences) / len(sequences)
        costs = self._costs([(sequence.drafter, sequence.worker) for sequence in sequences], context)
        depths = best_depths(reach, is_batch, costs, scale)
        hit_rates = np.array([sequence.acceptance.task.hit_rate for sequence in sequences])
        are_trees = np.array([sequence.drafter.width is Width.TREE for sequence in sequences])
        leaves = best_leaves(depths, reach, hit_rates, are_trees, costs, scale)
        mix = mix_of(depths, reach, costs, scale)
        fed = scale * float(leaves[are_trees].sum())
        mix = replace(mix, drafted=mix.drafted + scale * leaves.sum(), leaves=fed)
        round_s, step_s = (float(seconds) for seconds in round_seconds(mix, costs))
        self._expected_s = {True: round_s, False: step_s}
        self._counts = Counter(
            sequence.drafter.name for sequence, depth in zip(sequences, depths, strict=True) if depth
        )
        # As long as plain decoding would need for the tokens that a round should bring, but never so short
        # that a Draft which is slow by chance is given up.
        emitted = 1.0 + (reach * (np.arange(reach.shape[1]) < depths[:, None])).sum(axis=1)
        worth = (emitted - 1.0) * costs.step(mix.plain + mix.rounds, mix.plain + mix.rounds)
        # Who decodes freely is asked for guesses, and now and then for a round.
        guessing = np.maximum(mix.rounds, 1.0), np.maximum(mix.depth, PROBE_DEPTH)
        in_rounds, probing = (
            costs.drafting(rounds, depth, mix.leaves, np.zeros(()))
            for rounds, depth in ((mix.rounds, mix.depth), guessing)
        )
        patience = np.maximum(worth, SLACK * np.where(depths > 0, in_rounds, probing))
        for sequence, depth, count, seconds in zip(sequences, depths, leaves, patience, strict=True):
            sequence.go_on(int(depth), MEASURED, int(count), float(seconds))

    def _costs(self, drafted_by: Sequence[tuple[DrafterInfo, str]], context: float) -> "_Costs":
        """drafted_by: of each sequence, its drafter and the worker, as far as that is known."""
        # A sequence that has no worker yet counts at one that there is.
        counts = Counter(self._cost_of(info, worker) for info, worker in drafted_by)
        shares = [(cost, count / len(drafted_by)) for cost, count in counts.items()]
        calibration = np.array([self._calibration.of_rounds(info.name) for info, _ in drafted_by])
        are_beside = all(info.waits_in_step for info, _ in drafted_by)
        return _Costs(self._target, shares, context, calibration, are_beside)

    def _reach(self, sequences: list[PacedSequence]) -> Vector:
        """[sequences, MAX_DEPTH]"""
        rates = np.array([sequence.acceptance.rates() for sequence in sequences])
        is_drafting = np.array([sequence.depth > 0 for sequence in sequences])
        caps = np.array([self._cap(sequence) for sequence in sequences])
        kept = 1.0 + np.where(is_drafting, 1.0, -1.0) * self._settings.hysteresis
        reach = np.minimum(np.cumprod(rates, axis=1) * kept[:, None], 1.0)
        return np.asarray(np.where(np.arange(reach.shape[1]) < caps[:, None], reach, 0.0))


@dataclass(frozen=True)
class _Costs:
    """Costs at the batch's mean context, drafted by the slowest of those that draft."""

    target: StepCost
    drafters: list[tuple[DrafterCost, float]]  # each with its share of the sequences
    context: float  # tokens per sequence
    calibration: Vector  # [sequences, MAX_DEPTH]
    are_beside_target: bool

    def step(self, sequences: Vector, tokens: Vector) -> Vector:
        return self.target.seconds(sequences, tokens, self.context * sequences)

    def drafting(
        self, sequences: Vector, depth: Vector, leaves: Vector | float, target_step: Vector
    ) -> Vector:
        seconds = [
            drafter.seconds(share * sequences, depth, share * np.asarray(leaves), target_step)
            for drafter, share in self.drafters
        ]
        return np.asarray(np.max(seconds, axis=0))
