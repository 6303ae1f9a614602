"""The depths that give a batch the most tokens per second. Pure functions over arrays, torch-free."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

LEAST_REACH = 0.02  # probability below which a drafted token is not considered
POINTS = 65  # counts of drafted tokens that are compared, for each depth


class Costs(Protocol):
    """Seconds; arguments and results broadcast."""

    def step(self, sequences: Vector, tokens: Vector) -> Vector:
        """Of a target step over so many tokens of so many sequences."""

    def drafting(self, sequences: Vector, depth: int) -> Vector:
        """From a Verdict to the next Verify, with so many sequences in rounds."""

    @property
    def stretch(self) -> float:
        """Factor by which rounds were measured to last longer than ``round_seconds`` says."""


@dataclass(frozen=True)
class Mix:
    """Ways to run a batch, an array entry each."""

    plain: Vector  # sequences that decode freely
    rounds: Vector  # sequences in rounds
    drafted: Vector  # tokens that these verify per round, all together
    accepted: Vector  # how many of them are expected to stand


def mix_of(depths: NDArray[np.int64], reach: Vector, scale: float = 1.0) -> Mix:
    """One way to run a batch: [sequences] depths; ``reach`` and ``scale`` as for ``best_depths``."""
    drafted = np.arange(reach.shape[1]) < depths[:, None]
    in_rounds = depths > 0
    counts = ((~in_rounds).sum(), in_rounds.sum(), drafted.sum(), (reach * drafted).sum())
    return Mix(*(np.asarray(scale * count, np.float64) for count in counts))


def round_seconds(mix: Mix, depth: int, costs: Costs) -> tuple[Vector, Vector]:
    """Seconds from Verdict to Verdict, and of a step; ``depth`` is that of the deepest Draft.

    - All in rounds: the target verifies everyone and then waits for Drafts, or it verifies one half while the
      other drafts, whichever is faster: so does the engine (engine/gathering.py).
    - Mixed: plain sequences fill every step, and a sequence in rounds waits half a step for its turn.
    """
    verified = mix.rounds + mix.drafted
    drafting = costs.drafting(mix.rounds, depth)
    half = costs.step(mix.rounds / 2, verified / 2)
    in_halves = np.where(mix.rounds >= 2, np.maximum(2 * half, drafting + half), np.inf)
    together = drafting + costs.step(mix.rounds, verified)
    share = np.full_like(verified, 0.5)  # of the steps, in which a sequence in rounds takes part
    for _ in range(3):
        step = costs.step(mix.plain + share * mix.rounds, mix.plain + share * verified)
        share = step / (drafting + 1.5 * step)
    return np.where(mix.plain == 0, np.minimum(in_halves, together), drafting + 1.5 * step), step


def tokens_per_second(mix: Mix, depth: int, costs: Costs) -> Vector:
    """Of all sequences together; ``depth`` is that of the deepest Draft."""
    round_, step = round_seconds(mix, depth, costs)
    all_plain = mix.plain / costs.step(mix.plain, mix.plain)
    in_rounds = (mix.rounds + mix.accepted) / (costs.stretch * round_)
    return np.where(mix.rounds == 0, all_plain, mix.plain / step + in_rounds)


def best_depths(
    reach: Vector, is_batch: NDArray[np.bool_], costs: Costs, scale: float = 1.0
) -> NDArray[np.int64]:
    """[sequences] the depth of each, 0 for plain decoding.

    Interactive sequences get the Drafts that pay while all others decode freely. Sequences marked batch get
    those that still pay on top: they are the first to lose them.

    Args:
        reach: [sequences, max_depth] probability that a drafted token of that depth stands; falls with the
            depth, 0 where none may be drafted.
        is_batch: [sequences]
        scale: sequences at the target for each one here, which are taken to be like these.
    """
    depths = np.zeros(len(reach), np.int64)
    for rows in (~is_batch, is_batch):
        depths = _extended(depths, np.where(rows[:, None], reach, 0.0), reach, costs, scale)
    return depths


def _extended(
    depths: NDArray[np.int64], open_reach: Vector, reach: Vector, costs: Costs, scale: float
) -> NDArray[np.int64]:
    """With the Drafts among ``open_reach`` that pay, the likeliest tokens first."""
    max_depth = reach.shape[1]
    given = mix_of(depths, reach)
    deepest_given = int(depths.max(initial=0))
    order = np.argsort(-open_reach, axis=None, kind="stable")
    order = order[open_reach.ravel()[order] >= LEAST_REACH]
    best, best_rate = depths, -np.inf
    for deepest in range(max_depth + 1):
        chosen = order[order % max_depth < deepest]
        # The first so many of them: reach falls along a row, so they are the beginning of every row.
        counts = np.unique(np.linspace(0, len(chosen), POINTS).astype(np.int64))
        begun = _counted(chosen % max_depth == 0)[counts]
        mix = Mix(
            plain=scale * (given.plain - begun),
            rounds=scale * (given.rounds + begun),
            drafted=scale * (given.drafted + counts),
            accepted=scale * (given.accepted + _counted(open_reach.ravel()[chosen])[counts]),
        )
        rates = tokens_per_second(mix, max(deepest, deepest_given), costs)
        if rates.max() > best_rate:
            best_rate, count = rates.max(), counts[rates.argmax()]
            best = depths + np.bincount(chosen[:count] // max_depth, minlength=len(reach))
        if deepest and len(chosen) == len(order) and deepest >= deepest_given:
            break
    return best


def _counted(values: NDArray[np.generic]) -> Vector:
    """Sums of the first 0, 1, 2, ... values."""
    return np.concatenate([[0.0], np.cumsum(values.astype(np.float64))])
