"""Search for the depths at which a batch is served fastest. Pure functions over arrays, torch-free.

The objective is the mean, over the sequences, of the logarithm of their tokens per second. For identical
sequences its maximum is also that of the total tokens per second; for different sequences it is not. The
total at one moment is largest with deep Drafts for easy sequences, at the cost of hard sequences. But easy
sequences finish soon, and hard sequences then fill the batch.

Why the logarithm: an answer does not become longer by being faster. Let S streams answer request after
request in rounds of P seconds, with E tokens per round. The tokens per second over whole answers are then S /
(P mean(1 / E)), with the mean over answers. The share of time that a sequence spends in the batch is
proportional to 1 / E. So the relative change of these tokens per second is the change of the batch's mean of
log E - log P.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.pace.regression import Vector
from outrider.pace.tuning import TUNING


class Costs(Protocol):
    """Costs in seconds; arguments and results broadcast."""

    @property
    def calibration(self) -> Vector | float:
        """Factor by which rounds of each depth take longer than these costs, divided by the factor of plain
        decoding: [sequences, max_depth], or a single factor."""

    @property
    def plain_factor(self) -> float:
        """Factor by which plain decoding takes longer while other sequences are in rounds."""

    @property
    def draft_in_step(self) -> bool:
        """Whether Drafts are made in the target's own steps, so that all sequences wait for the deepest."""

    def step(self, sequences: Vector, tokens: Vector) -> Vector:
        """Seconds of a target step with these sequences and this total of tokens."""

    def drafting(
        self, sequences: Vector, depth: Vector, alternatives: Vector | float, target_step: Vector
    ) -> Vector:
        """Seconds from a Verdict to the next Draft at the target.

        Args:
            sequences: sequences in rounds.
            depth: depth of the deepest Draft.
            alternatives: total number of nodes next to chains that a drafter's model processes.
            target_step: seconds of a target step, during which draft-ahead can work.
        """


@dataclass(frozen=True)
class Mix:
    """Candidate ways to run a batch, one per array entry."""

    plain: Vector  # sequences in plain decoding
    rounds: Vector  # sequences in rounds
    drafted: Vector  # total drafted tokens per round
    log_tokens: Vector  # logarithm of the expected tokens of a round, summed over the sequences in rounds
    log_overrun: Vector  # logarithm of the factor by which rounds take longer, summed over those sequences
    depth: Vector  # depth of the deepest Draft
    alternatives: Vector | float = 0.0  # drafted tokens next to chains that a drafter's model processes


def mix_of(depths: NDArray[np.int64], reach: Vector, costs: Costs, scale: float = 1.0) -> Mix:
    """Returns the Mix for these depths [sequences]; ``reach`` and ``scale`` as for ``best_depths``."""
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
    """Returns seconds from Verdict to Verdict by the costs alone, and seconds of a step for plain decoding.

    If no sequence is in plain decoding, the second value is for a step with all sequences in plain decoding.
    """
    rounds = _together(mix, costs)
    everyone = mix.plain + mix.rounds
    plain_step = costs.step(everyone, everyone)
    if not np.any(mix.plain * mix.rounds):
        return rounds, plain_step
    mixed, step = _mixed(mix, costs)
    return np.where(mix.plain == 0, rounds, mixed), np.where(mix.rounds == 0, plain_step, step)


def _together(mix: Mix, costs: Costs) -> Vector:
    """Returns the seconds of a round if all sequences are in rounds.

    Either the target verifies all sequences and then waits for Drafts, or it verifies one half while the
    other half is drafted. The faster way counts, as in the engine
    (outrider/engine/scheduling/batch_delay.py). A target drafter never drafts while the target verifies.
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
    """Returns the seconds of a round and of a step for a mix of rounds and plain decoding.

    Because of plain decoding, steps follow each other without a pause. So a Draft misses at least the step
    that begins right after the Verdict. A slower Draft waits half a step on average. All sequences wait for a
    target drafter, whose Drafts miss no step.
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
    """Returns the mean over all sequences of the logarithm of their tokens per second."""
    round_, step = round_seconds(mix, costs)
    step = step * np.where(mix.rounds > 0, costs.plain_factor, 1.0)
    total = mix.log_tokens - mix.log_overrun - mix.rounds * np.log(round_) - mix.plain * np.log(step)
    return np.asarray(total / (mix.plain + mix.rounds))


def best_depths(
    reach: Vector, is_batch: NDArray[np.bool_], costs: Costs, scale: float = 1.0
) -> NDArray[np.int64]:
    """Returns the depth of each sequence, 0 for plain decoding: [sequences].

    Interactive sequences get the Drafts that pay while all batch sequences are in plain decoding. Sequences
    marked batch then get the Drafts that still pay. So they are the first to lose their Drafts under load.

    Args:
        reach: [sequences, max_depth] probability that a drafted token of that depth is accepted. It falls
            with the depth, and is 0 if the token may not be drafted.
        is_batch: [sequences]
        scale: number of sequences at the target per sequence in ``reach``.
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
    """Returns how many nodes pay next to each chain, alternatives and their successors: [sequences].

    An alternative is correct if its position is reached, the chain's token is wrong and the second guess is
    correct. It then adds one token to the Verdict. It costs the target one more token, and costs the draft
    nothing. In a tree the alternative is continued, with the acceptance rates of the chain. Some drafters
    process these nodes with their model too.

    Args:
        depths, reach, scale: as for ``best_depths``.
        hit_rates: rates at which second guesses are correct if the first guess is wrong.
        are_trees: whether alternatives are continued.
        are_fed: whether the drafter's model processes alternatives too.
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
    """Returns the probability that nodes next to a chain are accepted: [sequences, depth, depth].

    The second axis is the position of the alternative, the third the number of tokens from it to the node.

    Args:
        correct: [sequences, depth] probability that an alternative is accepted.
        rates: [sequences, depth] acceptance rates of the tokens after the alternative.
    """
    found = np.zeros((*correct.shape, correct.shape[1]))
    found[:, :, 0] = correct
    for after in range(1, correct.shape[1]):
        found[:, :-after, after] = found[:, :-after, after - 1] * rates[:, after:]
    return found


def _extended(
    depths: NDArray[np.int64], open_reach: Vector, reach: Vector, costs: Costs, scale: float
) -> NDArray[np.int64]:
    """Returns the depths, extended by the tokens of ``open_reach`` that pay: [sequences]."""
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
    # Candidates [deepest + 1, len(order)]: the first tokens of the order, up to a maximum depth per row.
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
    """Returns the logarithm of the calibration factors: [sequences, max_depth]."""
    return np.broadcast_to(np.log(costs.calibration), reach.shape)


def _counted(values: NDArray[Any]) -> Vector:
    """Returns the sums of the first 0, 1, 2, ... of n values: [..., n + 1] from [..., n]."""
    sums = np.cumsum(values, axis=-1, dtype=np.float64)
    return np.concatenate([np.zeros((*sums.shape[:-1], 1)), sums], axis=-1)
