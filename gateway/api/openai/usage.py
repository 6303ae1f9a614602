"""What an answer of the OpenAI API tells at its end: tokens, and what speculation did."""

from typing import Any

from gateway.api.openai.answer_types import FinalUsage, Metrics, TokenCounts
from gateway.api.openai.answer_types import Usage as UsageBody
from gateway.generation.request import AnswerUsage


def token_counts(prompt: int, completion: int) -> TokenCounts:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def usage_body(usage: AnswerUsage, seed: int) -> UsageBody:
    """Returns token counts and counters of speculation, all of them if the request asks for a report."""
    stats = usage.stats
    speculation: Any = {
        "target_passes": stats.target_passes,
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "seed": seed,
    }
    if usage.speculation.report:
        speculation |= _report(usage)
    return {
        **token_counts(usage.prompt_tokens, usage.completion_tokens),
        "completion_tokens_details": {
            "accepted_prediction_tokens": stats.accepted,
            "rejected_prediction_tokens": stats.drafted - stats.accepted,
        },
        "speculation": speculation,
    }


def _report(usage: AnswerUsage) -> dict[str, Any]:
    stats, asked = usage.stats, usage.speculation
    return {
        "mode": asked.mode,
        "depth": asked.depth,
        "drafter": asked.drafter,
        "verification": asked.verification,
        "reached": stats.reached,
        "forced": stats.forced,
        "mean_accepted_length": round(stats.mean_accepted_length, 3),
        "accepted_lengths": stats.histogram,
        "drafted_by": stats.by_drafter,
        "routed": stats.routes,
        "judged": stats.by_judged,
        "fallbacks": stats.fallbacks,
        "late_drafts": stats.late_drafts,
        "lost_drafts": stats.lost_drafts,
        "empty_drafts": stats.empty_drafts,
        "lost_targets": stats.lost_targets,
        "prepared_for": stats.prepared_for,
        "ahead_hit_ranks": stats.ahead_hit_ranks,
        "continued": stats.continued,
        "saved_ms": round(stats.saved_ms, 3),
        "wasted": stats.wasted,
    }


def final_usage(usage: AnswerUsage, seed: int) -> FinalUsage:
    """Returns the last fields of an answer; a report on a single answer includes its metrics."""
    last = FinalUsage(usage=usage_body(usage, seed))
    return {**last, "metrics": metrics_body(usage)} if has_metrics(usage) else last


def has_metrics(usage: AnswerUsage) -> bool:
    """Whether a report was asked for on one answer: acceptance of several together says little."""
    return usage.speculation.report and usage.answers == 1


def metrics_body(usage: AnswerUsage) -> Metrics:
    """Returns the acceptance of one answer under the names that AIPerf reads."""
    stats = usage.stats
    return {
        "speculative_decoding": {
            "mean_acceptance_length": round(1.0 + stats.mean_accepted_length, 6),
            "draft_acceptance_rate": round(stats.accepted / stats.drafted, 6) if stats.drafted else 0.0,
            "acceptance_histogram": {
                str(length): rounds for length, rounds in enumerate(stats.histogram) if rounds
            },
            "num_spec_steps": stats.rounds,
            "num_draft_tokens": stats.drafted,
            "num_accepted_draft_tokens": stats.accepted,
        }
    }
