"""Rows of results under load, computed from slices: modes, and adaptive drafting against the best mode."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.streams import Slice, percentile

BAR = 0.97  # lowest acceptable ratio
RESAMPLES = 10_000

Row = dict[str, Any]


def summary(slices: Sequence[Slice]) -> Row:
    """Returns the row of one mode: the rate by slice, other values over all requests."""
    first_token = [1e3 * seconds for part in slices for seconds in part.first_token_s]
    per_token = [1e3 * seconds for part in slices for seconds in part.per_token_s]
    rounds, passes = sum(part.rounds for part in slices), sum(part.passes for part in slices)
    finished = [stats for part in slices for stats in part.finished]
    finished_rounds = sum(stats.rounds for stats in finished)
    return {
        "tokens/s": statistics.median(part.rate for part in slices),
        "first token p50, ms": percentile(first_token, 50),
        "first token p99, ms": percentile(first_token, 99),
        "per token p50, ms": percentile(per_token, 50),
        "per token p99, ms": percentile(per_token, 99),
        # Biased with many streams: requests that finished are short, and depth is cut at their ends.
        "mean depth": sum(stats.drafted for stats in finished) / finished_rounds if finished_rounds else None,
        "share of passes with a Draft": rounds / passes if passes else None,
        "finished": len(finished),
    }


def against_best(slices: Mapping[str, Sequence[Slice]]) -> list[Row]:
    """Compares adaptive drafting with the best other mode by median. Empty if one of the two is missing."""
    rates = {mode: [part.rate for part in of_mode] for mode, of_mode in slices.items()}
    others = {mode: statistics.median(of_mode) for mode, of_mode in rates.items() if mode != "adaptive"}
    if not others or "adaptive" not in rates:
        return []
    reference = max(others, key=lambda mode: others[mode])
    ratios = [adaptive / best for adaptive, best in zip(rates["adaptive"], rates[reference], strict=True)]
    low, high = interval(ratios)
    ratio = statistics.median(ratios)
    return [
        {
            "reference": reference,
            "reference, tokens/s": others[reference],
            "adaptive / reference": ratio,
            "low": low,
            "high": high,
            "bar": BAR,
            "ok": max(ratio, high) >= BAR,
        }
    ]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 90 % bootstrap confidence interval of the median."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [5, 95])
    return float(low), float(high)
