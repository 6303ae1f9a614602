"""Advice as text and as JSON."""

from collections.abc import Iterable, Sequence
from typing import Any

from outrider.pace.experts import NO_EXPERTS
from workshop.advice.advice import Advice, Finding, Judgement
from workshop.advice.speed import FASTER, MIN_ACCEPTANCE

GB = 1e9
COUNTED = (1, 5)  # tokens in a step of one sequence for which the share of experts is reported
POSITIONS = 4  # positions with a column in the table; the JSON has all positions


def report(advice: Advice) -> str:
    """Returns the ranking, the findings by task and the recommendation as text."""
    basis = "measured on this machine" if advice.is_measured else "by data sheets"
    if advice.experts != NO_EXPERTS:
        one, five = (f"{share:.1%}" for share in _experts_by_tokens(advice).values())
        basis += f" with experts counted here: a token reads {one} of them, five of a text {five}"
    parts = [
        f"target {advice.target}: {advice.step_ms:.2f} ms a step of one token, steps {basis}",
        _table(_ranking_header(advice), (_ranked(judgement, advice) for judgement in advice.ranking)),
        f"Speed is to plain decoding, the geometric mean over tasks and temperatures. A draft should be more "
        f"than {FASTER:.0f} times\nfaster than the target, and its acceptance not below {MIN_ACCEPTANCE}: "
        "what breaks this rule of thumb is marked with *.",
        _table(
            _finding_header(advice),
            (_found(judgement, finding) for judgement in advice.ranking for finding in judgement.findings),
        ),
    ]
    parts += [f"refused: {name}: {reason}" for name, reason in advice.refused.items()]
    return "\n\n".join([*parts, advice.recommendation])


def _ranking_header(advice: Advice) -> list[str]:
    header = ["candidate", "acceptance", "times faster", "GB draft", "GB for the cache"]
    header += [f"speed at {streams}" for streams in advice.streams]
    if any(price is not None for price in advice.dollars):
        header += [f"$/M at {streams}" for streams in advice.streams]
    return header


def _ranked(judgement: Judgement, advice: Advice) -> list[str]:
    faster = judgement.times_faster
    cells = [
        judgement.name,
        f"{judgement.acceptance_rate:.2f}" + "*" * (judgement.acceptance_rate < MIN_ACCEPTANCE),
        "" if faster is None else f"{faster:.1f}" + "*" * (faster <= FASTER),
        f"{judgement.draft_memory / GB:.2f}" if judgement.draft_memory else "",
        f"{judgement.target_cache / GB:.2f}",
        *(f"{judgement.speedup(index):.2f}" for index in range(len(advice.streams))),
    ]
    return cells + [f"{price:.3f}" for price in judgement.dollars if price is not None]


def _finding_header(advice: Advice) -> list[str]:
    positions = [f"at {position}" for position in range(1, POSITIONS + 1)]
    depths = [f"{streams} streams" for streams in advice.streams]
    return ["candidate", "task", "temperature", *positions, "tokens/pass", *depths]


def _found(judgement: Judgement, finding: Finding) -> list[str]:
    """Returns a row. Its tokens per pass are at the best depth for the first number of streams."""
    rates = [*finding.deepest.rates, *[None] * POSITIONS][:POSITIONS]
    return [
        judgement.name,
        finding.task,
        f"{finding.temperature:g}",
        *("" if rate is None else f"{rate:.2f}" for rate in rates),
        f"{finding.expected[0].tokens_per_pass:.2f}",
        *(f"{rates.speedup:.2f} K={rates.depth}" for rates in finding.expected),
    ]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def as_json(advice: Advice) -> dict[str, Any]:
    """Returns the whole advice, the best candidate first."""
    return {
        "target": advice.target,
        "streams": advice.streams,
        "steps": "measured" if advice.is_measured else "data sheet",
        "target_step_ms": advice.step_ms,
        "experts_read_by_tokens": _experts_by_tokens(advice),
        "dollars_per_million_tokens": advice.dollars,
        "recommendation": advice.recommendation,
        "candidates": [_judgement(judgement, advice) for judgement in advice.ranking],
        "refused": advice.refused,
    }


def _experts_by_tokens(advice: Advice) -> dict[int, float]:
    """Returns the share of experts that a step of one sequence reads, by its tokens; empty if not counted."""
    if advice.experts == NO_EXPERTS:
        return {}
    return {tokens: float(advice.experts.share(1, tokens)) for tokens in COUNTED}


def _judgement(judgement: Judgement, advice: Advice) -> dict[str, Any]:
    return {
        "name": judgement.name,
        "drafter": judgement.drafter,
        "runs_in": judgement.place.value,
        "acceptance_rate": judgement.acceptance_rate,
        "draft_step_ms": None if judgement.step_s is None else 1e3 * judgement.step_s,
        "times_faster_than_target": judgement.times_faster,
        "warnings": judgement.warnings,
        "target_cache_bytes": judgement.target_cache,
        "draft_bytes": judgement.draft_memory,
        "score": judgement.score,
        "speedup": [judgement.speedup(index) for index in range(len(advice.streams))],
        "dollars_per_million_tokens": judgement.dollars,
        "by_task": [_finding(finding) for finding in judgement.findings],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "task": finding.task,
        "temperature": finding.temperature,
        "acceptance_rate": finding.deepest.acceptance_rate,
        "acceptance_by_position": finding.deepest.rates,
        "tokens_per_pass_by_depth": {
            depth: counts.tokens_per_pass for depth, counts in finding.by_depth.items()
        },
        "rounds": finding.deepest.rounds,
        "expected": [
            {
                "streams": rates.streams,
                "depth": rates.depth,
                "tokens_per_pass": rates.tokens_per_pass,
                "tokens_per_s": rates.tokens_per_s,
                "speedup": rates.speedup,
            }
            for rates in finding.expected
        ],
    }
