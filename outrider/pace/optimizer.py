"""The depths at which a batch is served fastest. Pure functions over arrays, torch-free.

The aim is the largest mean, over the sequences, of the logarithm of their tokens per second. If the
sequences are alike, that is the most tokens per second; if they differ, it is not. The most tokens per
second at a moment would come from deep Drafts for easy sequences, at the cost of hard sequences. But easy
sequences are soon through, and hard sequences then fill the batch.

Why the logarithm: answers do not get longer by being fast. Let S streams answer request after request in
rounds of P seconds, with E tokens a round. The tokens per second over whole answers are then S / (P mean(1 /
E)), the mean over answers. A sequence is in the batch for a share of the time that is proportional to 1 / E.
So the relative change of these tokens per second is the change of the batch's mean of log E - log P.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.pace.regression import Vector
from outrider.pace.tuning import TUNING


class Costs(Protocol):
    """Seconds; arguments and results broadcast."""

    @property
    def calibration(self) -> Vector | float:
        """[sequences, max_depth] factor by which rounds of each depth take longer than these costs, divided
        by the factor of plain decoding; or a single factor."""

    @property
    def plain_factor(self) -> float:
        """Factor by which plain decoding takes longer while other sequences are in rounds."""

    @property
    def draft_in_step(self) -> bool:
        """Whether Drafts are made in the target's own steps, so that all wait for the deepest."""

    def step(self, sequences: Vector, tokens: Vector) -> Vector:
        """Seconds of a target step over these tokens, all together, of these sequences."""

    def drafting(
        self, sequences: Vector, depth: Vector, alternatives: Vector | float, target_step: Vector
    ) -> Vector:
        """Seconds from a Verdict to the next Draft at the target.

        Args:
            sequences: sequences in rounds.
            depth: depth of the deepest Draft.
            alternatives: nodes next to the chains that a drafter feeds too, all together.
            target_step: seconds of a target step, in which draft-ahead has time.
        """


@dataclass(frozen=True)
class Mix:
    """Ways to run a batch, an array entry each."""

    plain: Vector  # sequences in plain decoding
    rounds: Vector  # sequences in rounds
    drafted: Vector  # drafted tokens per round, all together
    log_tokens: Vector  # logarithm of the expected tokens of a round, summed over the sequences in rounds
    log_overrun: Vector  # logarithm of the factor by which rounds take longer, summed over those sequences
    depth: Vector  # depth of the deepest Draft
    alternatives: Vector | float = 0.0  # drafted tokens next to chains that a drafter feeds too


def mix_of(depths: NDArray[np.int64], reach: Vector, costs: Costs, scale: float = 1.0) -> Mix:
    """One way to run a batch: [sequences] depths; ``reach`` and ``scale`` as for ``best_depths``."""
    drafted = np.arange(reach.shape[1]) < depths[:, None]
    in_rounds = depths > 0
    log_tokens = np.log1p((reach * drafted).sum(axis=1))
    overrun = np.take_along_axis(_log_overrun(costs, reach), np.maximum(depths - 1, 0)[:, None], axis=1)
    return Mix(
        plain=np.asarray(scale * (~in_rounds).sum(), np.float64),
        rounds=np.asarray(scale * in_rounds.sum(), np.float64),
        drafted=np.asarray(scale * drafted.sum(), np.float64),
        log_tokens=np.asarray(scale * log_tokens.sum(), np.float64),
        log_overrun=np.asarray(scale * (in_rounds * overrun[:, 0]).sum(), np.float64),
        depth=np.asarray(depths.max(initial=0), np.float64),
    )


def round_seconds(mix: Mix, costs: Costs) -> tuple[Vector, Vector]:
    """Seconds from Verdict to Verdict by the costs alone, and seconds of a step for plain decoding.

    If no sequence is in plain decoding, the second is the step in which all of them would be.
    """
    rounds = _together(mix, costs)
    everyone = mix.plain + mix.rounds
    plain_step = costs.step(everyone, everyone)
    if not np.any(mix.plain * mix.rounds):
        return rounds, plain_step
    mixed, step = _mixed(mix, costs)
    return np.where(mix.plain == 0, rounds, mixed), np.where(mix.rounds == 0, plain_step, step)


def _together(mix: Mix, costs: Costs) -> Vector:
    """Seconds of a round if all sequences are in rounds.

    The target verifies all sequences and then waits for Drafts, or it verifies one half while the other half
    is drafted, whichever is faster: so does the engine (outrider/engine/scheduling/batch_delay.py). A target
    drafter never drafts meanwhile.
    """
    checked = mix.rounds + mix.drafted
    whole = costs.step(mix.rounds, checked)
    in_turn = costs.drafting(mix.rounds, mix.depth, mix.alternatives, whole) + whole
    if costs.draft_in_step:
        return in_turn
    half = costs.step(mix.rounds / 2, checked / 2)
    drafting = costs.drafting(mix.rounds, mix.depth, mix.alternatives, half)
    in_halves = np.where(mix.rounds >= 2, np.maximum(2 * half, drafting + half), np.inf)
    return np.minimum(in_halves, in_turn)


def _mixed(mix: Mix, costs: Costs) -> tuple[Vector, Vector]:
    """Seconds of a round, and of a step, if some sequences are in rounds and some in plain decoding.

    Plain decoding fills every step. So a Draft misses at least the step that begins with its Verdict, and a
    slower Draft waits half a step for its turn. All sequences wait for a target drafter, whose Drafts miss
    no step.
    """
    checked = mix.rounds + mix.drafted
    if costs.draft_in_step:
        step = costs.step(mix.plain + mix.rounds, mix.plain + checked)
        step = step + costs.drafting(mix.rounds, mix.depth, mix.alternatives, step)
        return step, step
    share = np.full_like(checked, 0.5)  # share of the steps in which a sequence in rounds takes part
    for _ in range(3):
        step = costs.step(mix.plain + share * mix.rounds, mix.plain + share * checked)
        drafting = costs.drafting(mix.rounds, mix.depth, mix.alternatives, step)
        round_ = step + np.maximum(step, drafting + step / 2)
        share = step / round_
    return round_, step


def log_rate(mix: Mix, costs: Costs) -> Vector:
    """Mean over all sequences of the logarithm of their tokens per second."""
    round_, step = round_seconds(mix, costs)
    step = step * np.where(mix.rounds > 0, costs.plain_factor, 1.0)
    total = mix.log_tokens - mix.log_overrun - mix.rounds * np.log(round_) - mix.plain * np.log(step)
    return np.asarray(total / (mix.plain + mix.rounds))


def best_depths(
    reach: Vector, is_batch: NDArray[np.bool_], costs: Costs, scale: float = 1.0
) -> NDArray[np.int64]:
    """[sequences] the depth of each, 0 for plain decoding.

    Interactive sequences get the Drafts that pay while all others are in plain decoding. Sequences marked
    batch get the Drafts that still pay on top: they are the first to lose them.

    Args:
        reach: [sequences, max_depth] probability that a drafted token of that depth is accepted; falls with
            the depth, 0 if none may be drafted.
        is_batch: [sequences]
        scale: sequences at the target for each sequence here.
    """
    depths = np.zeros(len(reach), np.int64)
    for rows in (~is_batch, is_batch):
        if rows.any():
            depths = _extended(depths, np.where(rows[:, None], reach, 0.0), reach, costs, scale)
    return depths


def best_alternatives(
    depths: NDArray[np.int64],  # [sequences]
    reach: Vector,  # [sequences, max_depth]
    hit_rates: Vector,  # [sequences]
    are_trees: NDArray[np.bool_],  # [sequences]
    are_fed: NDArray[np.bool_],  # [sequences]
    costs: Costs,
    scale: float = 1.0,
) -> NDArray[np.int64]:
    """[sequences] nodes that pay next to the chains: an alternative at each position, and what follows it.

    An alternative is correct if its position is reached, the chain's token is wrong and the second guess is
    correct. It then adds one token to the Verdict. It costs the target one more token, and the draft nothing.
    In a tree the alternative is continued, as often correctly as the chain is. Some drafters feed it too.

    Args:
        depths, reach, scale: as for ``best_depths``.
        hit_rates: rates at which second guesses are correct, if the first guess is wrong.
        are_trees: whether alternatives are continued.
        are_fed: whether the drafter feeds them too.
    """
    if not (depths * hit_rates).any():
        return np.zeros_like(depths)
    deepest = int(depths.max())
    before = np.concatenate([np.ones((len(reach), 1)), reach[:, :-1]], axis=1)[:, :deepest]
    accepted = np.where(np.arange(deepest) < depths[:, None], reach[:, :deepest], 0.0)
    tokens = 1.0 + accepted.sum(axis=1)
    correct = np.where(accepted > 0.0, before - accepted, 0.0) * hit_rates[:, None]
    rates = np.where(are_trees[:, None], accepted / np.maximum(before, TUNING.smallest), 0.0)
    gains = np.log1p(_continued(correct, rates) / tokens[:, None, None]).ravel()
    order = np.argsort(-gains, kind="stable")
    order = order[gains[order] > 0.0]
    counts = np.unique(np.linspace(0, len(order), TUNING.compared).astype(np.int64))
    given = mix_of(depths, reach, costs, scale)
    owners = order // deepest**2
    mix = Mix(
        plain=given.plain,
        rounds=given.rounds,
        drafted=given.drafted + scale * counts,
        log_tokens=given.log_tokens + scale * _counted(gains[order])[counts],
        log_overrun=given.log_overrun,
        depth=given.depth,
        alternatives=scale * _counted(are_fed[owners])[counts],
    )
    chosen = owners[: counts[log_rate(mix, costs).argmax()]]
    alternatives: NDArray[np.int64] = np.bincount(chosen, minlength=len(reach))
    return alternatives


def _continued(correct: Vector, rates: Vector) -> Vector:
    """[sequences, depth, depth] probability that nodes next to a chain are accepted.

    The second axis is the position of their alternative, the third the number of tokens after it.

    Args:
        correct: [sequences, depth] probability that an alternative is accepted.
        rates: [sequences, depth] acceptance rate of what follows it.
    """
    found = np.zeros((*correct.shape, correct.shape[1]))
    found[:, :, 0] = correct
    for after in range(1, correct.shape[1]):
        found[:, :-after, after] = found[:, :-after, after - 1] * rates[:, after:]
    return found


def _extended(
    depths: NDArray[np.int64], open_reach: Vector, reach: Vector, costs: Costs, scale: float
) -> NDArray[np.int64]:
    """[sequences] depths, extended by the Drafts among ``open_reach`` that pay."""
    max_depth = reach.shape[1]
    given = mix_of(depths, reach, costs)
    overrun = np.diff(_log_overrun(costs, reach), axis=1, prepend=0.0).ravel()  # per drafted token
    log_tokens = np.log1p(np.cumsum(reach, axis=1))  # tokens of a round, by depth
    gains = np.diff(log_tokens, axis=1, prepend=0.0)  # per drafted token; falls along a row
    gains = np.where(open_reach >= TUNING.least_reach, gains, 0.0).ravel()
    order = np.argsort(-gains, kind="stable")
    order = order[gains[order] > 0.0]
    position = order % max_depth
    deepest = int(position.max(initial=-1)) + 1
    # Candidates [deepest + 1, len(order)]: the first tokens of the order, none deeper than a depth.
    allowed = position < np.arange(deepest + 1)[:, None]
    counts = np.unique(np.linspace(0, len(order), TUNING.compared).astype(np.int64))
    added = _counted(allowed)[:, counts]
    is_first = allowed & (position == 0)
    starting = _counted(is_first)[:, counts]
    mix = Mix(
        plain=scale * (given.plain - starting),
        rounds=scale * (given.rounds + starting),
        drafted=scale * (given.drafted + added),
        log_tokens=scale * (given.log_tokens + _counted(allowed * gains[order])[:, counts]),
        log_overrun=scale * (given.log_overrun + _counted(allowed * overrun[order])[:, counts]),
        depth=np.maximum(np.arange(deepest + 1)[:, None], given.depth) + np.zeros_like(starting),
    )
    depth, point = np.unravel_index(log_rate(mix, costs).argmax(), starting.shape)
    chosen = order[: counts[point]][allowed[depth, : counts[point]]]
    more: NDArray[np.int64] = np.bincount(chosen // max_depth, minlength=len(reach))
    return depths + more


def _log_overrun(costs: Costs, reach: Vector) -> Vector:
    """[sequences, max_depth]"""
    return np.broadcast_to(np.log(costs.calibration), reach.shape)


def _counted(values: NDArray[Any]) -> Vector:
    """[..., n + 1] sums of the first 0, 1, 2, ... values [..., n]."""
    sums = np.cumsum(values, axis=-1, dtype=np.float64)
    return np.concatenate([np.zeros((*sums.shape[:-1], 1)), sums], axis=-1)
