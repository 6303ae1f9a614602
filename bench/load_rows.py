"""Rows of results under load, computed from slices: each mode, and adaptive drafting beside another mode."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.streams import Slice, Steps, percentile, streams_at, window_starts

CROSSING_BAR = 0.9
WINDOW_S = 5  # seconds of a window of the crossing
RESAMPLES = 10_000

Row = dict[str, Any]


def rates(slices: Mapping[str, Sequence[Slice]]) -> dict[str, list[float]]:
    return {mode: [part.rate for part in of_mode] for mode, of_mode in slices.items()}


def summary(slices: Sequence[Slice]) -> Row:
    """Returns the row of one mode: rates by slice, everything else over all requests."""
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
        # Of those that finished, where there are many streams the short ones: at their ends depth is cut.
        "mean depth": sum(stats.drafted for stats in finished) / finished_rounds if finished_rounds else None,
        "share of passes with a Draft": rounds / passes if passes else None,
        "finished": len(finished),
    }


def against_best(rates: Mapping[str, Sequence[float]], bar: float) -> list[Row]:
    """Compares adaptive with the best other mode by median; returns nothing if one of the two is missing."""
    others = {mode: statistics.median(of_mode) for mode, of_mode in rates.items() if mode != "adaptive"}
    if not others or "adaptive" not in rates:
        return []
    reference = max(others, key=lambda mode: others[mode])
    ratios = [ours / theirs for ours, theirs in zip(rates["adaptive"], rates[reference], strict=True)]
    low, high = interval(ratios)
    ratio = statistics.median(ratios)
    return [
        {
            "reference": reference,
            "reference, tokens/s": others[reference],
            "adaptive / reference": ratio,
            "low": low,
            "high": high,
            "bar": bar,
            "ok": max(ratio, high) >= bar,
        }
    ]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Interval that holds the median with 90 %, by bootstrap; equal for equal values."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [5, 95])
    return float(low), float(high)


def crossing_rows(steps: Steps, pairs: Sequence[Mapping[str, Sequence[float]]]) -> list[Row]:
    """Returns a row per window; rates and ratios are medians over the pairs."""
    rows = []
    for window, start in enumerate(window_starts(steps, WINDOW_S)):
        plain = [pair["plain"][window] for pair in pairs]
        adaptive = [pair["adaptive"][window] for pair in pairs]
        ratio = statistics.median(ours / theirs for ours, theirs in zip(adaptive, plain, strict=True))
        rows.append(
            {
                "from, s": start,
                "streams": streams_at(steps, start),
                "plain, tokens/s": statistics.median(plain),
                "adaptive, tokens/s": statistics.median(adaptive),
                "adaptive / plain": ratio,
                "ok": ratio >= CROSSING_BAR,
            }
        )
    return rows
