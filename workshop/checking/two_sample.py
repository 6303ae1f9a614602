"""Permutation test whether texts of two deployments have one distribution, and which difference it detects.

For every prompt and position, the tokens of both deployments form a contingency table with Pearson's
chi-square. Two statistics summarize all tables. The sum of the chi-squares detects a difference that is
spread over all tables. The largest chi-square, in standard deviations, detects a difference in one table. If
the deployments are equal, each text could as well have come from the other deployment. So the distribution of
both statistics is found by shuffling texts between the deployments. Whole texts are shuffled, which keeps the
dependence between the positions of a text. The test needs no probabilities and no assumptions, and its rate
of false alarms is not higher than stated.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

PERMUTATIONS = 9999  # so the smallest p-value is 2 / 10,000
STATISTICS = 2  # number of statistics, which share the false-alarm probability equally (Bonferroni)
POWER = 0.9  # probability of detecting the reported distance
MIN_EXPECTED = 5.0  # least expected texts per cell in the smaller sample; rarer tokens share cells
END, RARER = "(end)", "(rarer ones, part {})"  # cells that do not stand for a single token
MAX_RARE_CELLS = 8  # most cells that the rarer tokens of a table share, chosen by a hash
REPORTED_CELLS = 5  # cells that are reported

Tokens = tuple[str, ...]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Moved:
    """Cell of a table, with the number of texts of each deployment in it."""

    prompt: int
    position: int  # in the answer, from 0
    token: str
    a: int
    b: int


@dataclass(frozen=True)
class TwoSampleTest:
    """Result of the test."""

    p_value: float
    num_tables: int  # prompts and positions with more than one cell
    # total variation distance that is detected with probability POWER, root mean square over all tables
    distance: float | None
    most_moved: tuple[Moved, ...]  # cells with the largest parts of the statistic, the largest first


@dataclass(frozen=True)
class _Table:
    position: int
    cells: tuple[str, ...]
    members: NDArray[np.float32]  # [num_texts, num_cells] 1 if the text has the cell


def two_sample_test(
    samples: Sequence[tuple[Sequence[Tokens], Sequence[Tokens]]],
    false_alarm: float,
    seed: int,
    permutations: int = PERMUTATIONS,
) -> TwoSampleTest:
    """Tests whether the texts of A and B have one distribution.

    Args:
        samples: texts of A and texts of B for each prompt, all independent.
        false_alarm: largest p-value that counts as a difference.
        seed: seed of the shuffles.

    Raises:
        ValueError: a prompt has no texts of A or of B.
    """
    generator = np.random.default_rng(seed)
    chi_squares: list[Floats] = []  # for each table: the observed value, then the values of shuffled texts
    weight = 0.0
    moved: list[tuple[float, Moved]] = []
    for prompt, (a, b) in enumerate(samples):
        if not a or not b:
            raise ValueError(f"prompt {prompt} has {len(a)} texts of A and {len(b)} of B: give some of each")
        of_a = np.zeros((permutations + 1, len(a) + len(b)), np.float32)
        of_a[:, : len(a)] = 1.0
        of_a[1:] = generator.permuted(of_a[1:], axis=1)
        for table in _tables([*a, *b], min(len(a), len(b))):
            parts = _parts(of_a @ table.members, table.members.sum(axis=0), len(a), len(b))
            chi_squares.append(parts.sum(axis=1))
            weight += len(a) * len(b) / (len(a) + len(b))
            moved += _moved(prompt, table, parts[0], len(a))
    if not chi_squares:
        return TwoSampleTest(1.0, 0, None, ())
    of_tables = np.stack(chi_squares)  # [num_tables, 1 + permutations]
    sums = of_tables.sum(axis=0)
    means, spreads = (f(of_tables, axis=1, keepdims=True) for f in (np.mean, np.std))
    largest = ((of_tables - means) / np.maximum(spreads, 1e-9)).max(axis=0)
    moved.sort(key=lambda pair: -pair[0])
    return TwoSampleTest(
        p_value=min(1.0, STATISTICS * min(_p_value(sums), _p_value(largest))),
        num_tables=len(of_tables),
        distance=smallest_distance(sums[1:], weight, false_alarm / STATISTICS),
        most_moved=tuple(cell for _, cell in moved[:REPORTED_CELLS]),
    )


def _p_value(statistics: Floats) -> float:
    """Returns the share of statistics at least as large as the first statistic, allowing for rounding."""
    reached = statistics >= statistics[0] - 1e-6 * abs(statistics[0])
    return float(reached.mean())


def smallest_distance(shuffled: Floats, weight: float, false_alarm: float) -> float:
    """Returns the total variation distance between next tokens that the test detects with probability POWER.

    A distance d moves the mean of a table's chi-square by at least 4 d^2 n_a n_b / (n_a + n_b). It moves by
    exactly that if half of the probability mass grows proportionally and the other half shrinks. So the
    result holds for every kind of difference, except a difference within a cell of rarer tokens. The variance
    grows as for a noncentral chi-square, starting from the variance under shuffling.

    Args:
        shuffled: the statistic under shuffled texts.
        weight: sum over tables of n_a n_b / (n_a + n_b).
    """
    mean, variance = float(shuffled.mean()), float(shuffled.var())
    needed = max(float(np.quantile(shuffled, 1.0 - false_alarm)) - mean, 0.0)
    spread = max(variance / (2.0 * mean), 1e-9)  # 1 for independent tables
    quantile = NormalDist().inv_cdf(POWER)
    # The shift s solves s - quantile * sqrt(variance + 4 spread s) = needed.
    root = 2 * spread * quantile + np.sqrt((2 * spread * quantile) ** 2 + variance + 4 * spread * needed)
    shift = (root**2 - variance) / (4 * spread)
    return min(1.0, float(np.sqrt(shift / (4.0 * weight))))


def _tables(texts: Sequence[Tokens], smaller: int) -> list[_Table]:
    """Returns the tables of one prompt's texts, texts of A first. smaller: size of the smaller sample."""
    tables = []
    least = MIN_EXPECTED * len(texts) / smaller
    for position in range(max(map(len, texts))):
        column = [text[position] if position < len(text) else END for text in texts]
        counts = Counter(column)
        cell_of = _cells(counts, least)
        index = {cell: place for place, cell in enumerate(dict.fromkeys(cell_of.values()))}
        if len(index) < 2:
            continue
        members = np.zeros((len(texts), len(index)), np.float32)
        members[np.arange(len(texts)), [index[cell_of[token]] for token in column]] = 1.0
        tables.append(_Table(position, tuple(index), members))
    return tables


def _cells(counts: Mapping[str, int], least: float) -> dict[str, str]:
    """Returns each token's cell. Rarer tokens share as many cells as they would fill if spread evenly."""
    rarer = {token: count for token, count in counts.items() if count < least}
    parts = max(1, min(MAX_RARE_CELLS, int(sum(rarer.values()) / least)))
    return {
        token: RARER.format(1 + crc32(token.encode()) % parts) if token in rarer else token
        for token in counts
    }


def _parts(counts: NDArray[np.float32], totals: NDArray[np.float32], num_a: int, num_b: int) -> Floats:
    """Returns each cell's part of the table's chi-square: float64 [num_shuffles, num_cells].

    Args:
        counts: [num_shuffles, num_cells] counts of the texts that are assigned to A.
        totals: [num_cells] counts of all texts.
    """
    share = num_a / (num_a + num_b)
    expected = totals.astype(np.float64) * share
    parts: Floats = (counts - expected) ** 2 / (expected * (1 - share))
    return parts


def _moved(prompt: int, table: _Table, parts: Floats, num_a: int) -> list[tuple[float, Moved]]:
    a, b = table.members[:num_a].sum(axis=0), table.members[num_a:].sum(axis=0)
    cells = zip(parts.tolist(), table.cells, a.tolist(), b.tolist(), strict=True)
    return [(part, Moved(prompt, table.position, cell, int(x), int(y))) for part, cell, x, y in cells]
