"""Depths of all sequences at a target, from predicted costs and acceptance rates. Torch-free.

``optimizer.py`` has the theory and the search. This file converts sequences to its arrays, and its results to
decisions. Until costs are known, and under policy "thresholds", the classic fixed rules decide.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.registry import Width
from outrider.pace.costs import BatchCosts, Expectation
from outrider.pace.optimizer import (
    Mix,
    best_alternatives,
    best_depths,
    log_rate,
    mix_of,
    round_seconds,
)
from outrider.pace.regression import Vector
from outrider.pace.sequence import MEASURED, THRESHOLDS, Decision, PacedSequence
from outrider.pace.settings import PaceSettings
from outrider.pace.tuning import TUNING


def threshold_depth(
    settings: PaceSettings, acceptance_rate: float, running: float, is_drafting: bool, is_batch: bool = False
) -> int:
    """Returns the depth by fixed rules: 0 at low acceptance, halved and then 0 under load.

    Args:
        acceptance_rate: accepted / reached.
        running: sequences that decode at the target, without sequences in prefill.
        is_drafting: whether the sequence has Drafts now; to begin needs a higher rate than to continue.
        is_batch: whether the sequence is marked batch; its Drafts end already at half_depth_from.
    """
    least = settings.off_below if is_drafting else settings.on_above
    off_from = min(settings.half_depth_from, settings.off_from) if is_batch else settings.off_from
    if running >= off_from or acceptance_rate < least:
        return 0
    if running >= settings.half_depth_from:
        return (settings.threshold_depth + 1) // 2
    return settings.threshold_depth


def by_thresholds(settings: PaceSettings, sequence: PacedSequence, running: float) -> Decision:
    """Decides for one sequence by the fixed rules.

    The acceptance rate counts as 1 until it is known, because costs become known only with Drafts.
    """
    is_known = settings.policy == "thresholds" or sequence.acceptance.is_known
    rate = sequence.acceptance.overall_rate if is_known else 1.0
    depth = threshold_depth(settings, rate, running, sequence.depth > 0, sequence.is_batch)
    return Decision(min(depth, sequence.cap(settings)), THRESHOLDS)


def by_costs(
    settings: PaceSettings, sequences: Sequence[PacedSequence], costs: BatchCosts, scale: float
) -> tuple[list[Decision], Expectation]:
    """Decides for all sequences at a target.

    scale: number of sequences at the target per sequence in ``sequences``.

    Returns:
        a decision for each sequence, and the predicted times of rounds and of plain decoding.
    """
    reach = _reach(settings, sequences)
    is_batch = np.array([sequence.is_batch for sequence in sequences])
    depths = best_depths(reach, is_batch, costs, scale)
    hit_rates = np.array([sequence.acceptance.task.hit_rate for sequence in sequences])
    are_trees = np.array([sequence.drafter.has_trees for sequence in sequences])
    are_fed = np.array([sequence.drafter.width is Width.TREE for sequence in sequences])
    alternatives = best_alternatives(depths, reach, hit_rates, are_trees, are_fed, costs, scale)
    mix = mix_of(depths, reach, costs, scale)
    fed = scale * float(alternatives[are_fed].sum())
    mix = replace(mix, drafted=mix.drafted + scale * alternatives.sum(), alternatives=fed)
    round_s, step_s = (float(seconds) for seconds in round_seconds(mix, costs))
    in_rounds = Counter(
        sequence.drafter.name for sequence, depth in zip(sequences, depths, strict=True) if depth
    )
    everyone = mix.plain + mix.rounds
    plain_s = float(costs.step(everyone, everyone))
    patience = _patience(depths, reach, mix, costs)
    survival = _least_survival(depths, reach, mix, costs)
    decisions = [
        Decision(int(depth), MEASURED, int(count), float(seconds), float(least))
        for depth, count, seconds, least in zip(depths, alternatives, patience, survival, strict=True)
    ]
    return decisions, Expectation(round_s, step_s, plain_s, in_rounds)


def best_rate(max_depth: int, rates: Sequence[float], costs: BatchCosts, running: float) -> float:
    """Returns tokens per second of a sequence if all sequences were drafted alike, at the best depth.

    Args:
        rates: acceptance rate of each position, given that it is reached.
        costs: costs of a batch whose sequences are all drafted alike.
        running: sequences at the target.
    """
    depths = np.arange(max_depth + 1)
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


def _reach(settings: PaceSettings, sequences: Sequence[PacedSequence]) -> Vector:
    """Returns the probability that a position is accepted, with hysteresis: [sequences, MAX_DEPTH]."""
    rates = np.array([sequence.acceptance.rates() for sequence in sequences])
    is_drafting = np.array([sequence.depth > 0 for sequence in sequences])
    caps = np.array([sequence.cap(settings) for sequence in sequences])
    kept = 1.0 + np.where(is_drafting, 1.0, -1.0) * settings.hysteresis
    reach = np.minimum(np.cumprod(rates, axis=1) * kept[:, None], 1.0)
    return np.asarray(np.where(np.arange(reach.shape[1]) < caps[:, None], reach, 0.0))


def _least_survival(depths: NDArray[np.int64], reach: Vector, mix: Mix, costs: BatchCosts) -> Vector:
    """Returns the acceptance probability from which a further node pays: [sequences].

    A node that is accepted with probability s adds log(1 + s / tokens) to its sequence's logarithm of tokens.
    All sequences together lose the cost of the target's longer steps.
    """
    more = replace(mix, drafted=mix.drafted + TUNING.priced_nodes)
    lost = (mix.plain + mix.rounds) * (log_rate(mix, costs) - log_rate(more, costs)) / TUNING.priced_nodes
    tokens = 1.0 + (reach * (np.arange(reach.shape[1]) < depths[:, None])).sum(axis=1)
    return np.asarray(np.clip(tokens * np.expm1(np.maximum(lost, 0.0)), TUNING.least_reach, 1.0))


def _patience(depths: NDArray[np.int64], reach: Vector, mix: Mix, costs: BatchCosts) -> Vector:
    """Returns the seconds to wait for a Draft: [sequences].

    It is the time that plain decoding needs for the tokens that a round is expected to gain. It is at least a
    multiple of the drafting time, to tolerate random delays.
    """
    gained = (reach * (np.arange(reach.shape[1]) < depths[:, None])).sum(axis=1)
    worth = gained * costs.step(mix.plain + mix.rounds, mix.plain + mix.rounds)
    # A sequence in plain decoding has probes, and occasionally a trial round.
    probing = np.maximum(mix.rounds, 1.0), np.maximum(mix.depth, TUNING.probe_depth)
    in_rounds, in_probes = (
        costs.drafting(rounds, depth, mix.alternatives, np.zeros(()))
        for rounds, depth in ((mix.rounds, mix.depth), probing)
    )
    return np.asarray(np.maximum(worth, TUNING.slack * np.where(depths > 0, in_rounds, in_probes)))
