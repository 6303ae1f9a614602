"""Fields that all answers of the OpenAI API have in common: token counts and counters."""

from collections.abc import Iterable
from typing import Any

from gateway.api.openai.answer_types import FinalUsage, Metrics, TokenCounts
from gateway.api.openai.answer_types import Usage as UsageBody
from gateway.generation.request import AnswerUsage
from gateway.loop.stats import Stats
from outrider.telemetry.counters import IN_EVERY_ANSWER, IN_REPORTS, SpeculationCounter


def token_counts(prompt: int, completion: int) -> TokenCounts:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def usage_body(usage: AnswerUsage, seed: int, thought_tokens: int = 0) -> UsageBody:
    """Returns token counts and counters of speculation, all of them if the request asks for a report.

    thought_tokens: tokens of the answers that belong to thoughts.
    """
    stats, asked = usage.stats, usage.speculation
    speculation: dict[str, Any] = {**_values(stats, IN_EVERY_ANSWER), "seed": seed}
    if asked.report:
        speculation |= asked.model_dump(include={"mode", "depth", "drafter", "verification"})
        speculation |= _values(stats, IN_REPORTS)
    return {
        **token_counts(usage.prompt_tokens, usage.completion_tokens),
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": thought_tokens,
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
        "speculation": speculation,
    }


def _values(stats: Stats, counters: Iterable[SpeculationCounter]) -> dict[str, Any]:
    values = {counter.name: getattr(stats, counter.name) for counter in counters}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}


def final_usage(usage: AnswerUsage, seed: int, thought_tokens: int = 0) -> FinalUsage:
    """Returns the last fields of an answer; a report on a single answer includes its metrics.

    thought_tokens: as for ``usage_body``.
    """
    last = FinalUsage(usage=usage_body(usage, seed, thought_tokens))
    return {**last, "metrics": metrics_body(usage)} if has_metrics(usage) else last


def has_metrics(usage: AnswerUsage) -> bool:
    """Returns whether the request asks for a report on a single answer: a mean over several means little."""
    return usage.speculation.report and usage.answers == 1


def metrics_body(usage: AnswerUsage) -> Metrics:
    """Returns the acceptance of one answer, with the names and formats that AIPerf reads.

    An index may guess deeper than the request allows.
    """
    stats = usage.stats
    deepest = max(usage.speculation.depth or 0, *stats.lengths, 0)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": round(1.0 + stats.mean_accepted_length, 6),
            "draft_acceptance_rate": round(stats.accepted / stats.drafted, 6) if stats.drafted else 0.0,
            "acceptance_histogram": [stats.lengths[length] for length in range(deepest + 1)],
            "num_spec_tokens": deepest,
            "num_spec_steps": stats.rounds,
            "num_draft_tokens": stats.drafted,
            "num_accepted_draft_tokens": stats.accepted,
        }
    }
