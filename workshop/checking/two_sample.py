"""Whether texts of two deployments have one distribution: a permutation test, and what it would find.

For every prompt and position the tokens of both deployments make a table of counts, which has a chi-square
of Pearson's. Two statistics are made of them: their sum, which sees what is off everywhere, and the largest,
in units of its spread, which sees what is off in one place. If the deployments are the same, a text could as
well have come from the other: so the distribution of both statistics is that under shuffled texts, whole
ones, which keeps whatever positions of a text have to do with each other. This needs no probabilities and no
assumption, and never calls deployments that are the same different more often than it says.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

PERMUTATIONS = 9999  # no p-value is below two in 10,000
STATISTICS = 2  # each may call different with half of the probability of a false alarm
POWER = 0.9  # with which the distance that is told would be found
LEAST_EXPECTED = 5.0  # texts of a cell in the smaller sample; rarer tokens share cells
END, RARER = "(end)", "(rarer ones, part {})"  # cells that are no token
MOST_RARER = 8  # cells over which rarer tokens of a table are spread, by a hash of theirs
MOST_MOVED = 5  # cells that are told

Tokens = tuple[str, ...]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Moved:
    """A cell, and how often each deployment's texts have it."""

    prompt: int
    position: int  # in the answer, from 0
    token: str
    a: int
    b: int


@dataclass(frozen=True)
class TwoSampleTest:
    """What the test says."""

    p_value: float
    num_tables: int  # prompts and positions with more than one cell
    distance: float | None  # total variation, root mean square of all tables, that is found with POWER
    most_moved: tuple[Moved, ...]  # the largest parts of the statistic, the largest first


@dataclass(frozen=True)
class _Table:
    position: int
    cells: tuple[str, ...]
    members: NDArray[np.float32]  # [num_texts, num_cells] 1 where the text has the cell


def two_sample_test(
    samples: Sequence[tuple[Sequence[Tokens], Sequence[Tokens]]],
    false_alarm: float,
    seed: int,
    permutations: int = PERMUTATIONS,
) -> TwoSampleTest:
    """
    Args:
        samples: per prompt the texts of A and those of B, independent ones.
        false_alarm: from which p-value on down the test calls them different.
        seed: of the shuffling.

    Raises:
        ValueError: a prompt lacks texts of one of them.
    """
    generator = np.random.default_rng(seed)
    chi_squares: list[Floats] = []  # by table; the first of each is how it was, the others are shuffled
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
        most_moved=tuple(cell for _, cell in moved[:MOST_MOVED]),
    )


def _p_value(statistics: Floats) -> float:
    """Of the first among all. Sums of the same numbers in another order may differ by rounding."""
    reached = statistics >= statistics[0] - 1e-6 * abs(statistics[0])
    return float(reached.mean())


def smallest_distance(shuffled: Floats, weight: float, false_alarm: float) -> float:
    """The total variation distance between next tokens that would be found with the probability POWER.

    A distance d moves the mean of a table's chi-square by at least 4 d^2 n_a n_b / (n_a + n_b): by that much
    where half of the mass gains in proportion and the other half loses, by more where it lies otherwise. So
    what is told holds wherever the distance lies, unless it lies within a cell of rarer tokens. The
    variance grows as that of a noncentral chi-square, here one with the variance that shuffling shows.

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
    """Of one prompt's texts, those of A first. ``smaller`` is the number of the smaller sample."""
    tables = []
    least = LEAST_EXPECTED * len(texts) / smaller
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
    """By token. Rarer ones share cells: as many as their texts fill, were they spread evenly."""
    rarer = {token: count for token, count in counts.items() if count < least}
    parts = max(1, min(MOST_RARER, int(sum(rarer.values()) / least)))
    return {
        token: RARER.format(1 + crc32(token.encode()) % parts) if token in rarer else token
        for token in counts
    }


def _parts(counts: NDArray[np.float32], totals: NDArray[np.float32], num_a: int, num_b: int) -> Floats:
    """float64 [num_shuffles, num_cells]: each cell's part of the table's chi-square.

    Args:
        counts: [num_shuffles, num_cells] of the texts that count as A's.
        totals: [num_cells] of all texts.
    """
    share = num_a / (num_a + num_b)
    expected = totals.astype(np.float64) * share
    parts: Floats = (counts - expected) ** 2 / (expected * (1 - share))
    return parts


def _moved(prompt: int, table: _Table, parts: Floats, num_a: int) -> list[tuple[float, Moved]]:
    a, b = table.members[:num_a].sum(axis=0), table.members[num_a:].sum(axis=0)
    cells = zip(parts.tolist(), table.cells, a.tolist(), b.tolist(), strict=True)
    return [(part, Moved(prompt, table.position, cell, int(x), int(y))) for part, cell, x, y in cells]
