"""Publishes the metrics of this gateway once a second, so that no round or token pays for them."""

import asyncio

from gateway.generation.generation import Generation
from gateway.generation.totals import StatsKey, Timing
from gateway.generation.tracing import PROVIDER
from gateway.loop.stats import Stats
from gateway.observe.vllm_metrics import publish_as_vllm, vllm_labels
from outrider.telemetry.counters import COUNTERS
from outrider.telemetry.instruments import Instruments
from outrider.telemetry.metrics import drafted_labels
from outrider.telemetry.reasons import DepthReason

PERIOD_S = 1.0

# Metrics of the Drafts of each drafter, by counter.
DRAFTED_BY = {
    "rounds": "outrider_drafted_by_rounds",
    "reached": "outrider_drafted_by_reached_tokens",
    "accepted": "outrider_drafted_by_accepted_tokens",
}

# Metrics of the guesses of drafters that did not draft, by counter.
JUDGED = {"reached": "outrider_judged_reached_tokens", "correct": "outrider_judged_correct_tokens"}


# Metrics of each tenant, by counter.
OF_TENANT = {
    "requests": "outrider_tenant_requests",
    "prompt_tokens": "outrider_tenant_prompt_tokens",
    "answer_tokens": "outrider_tenant_answer_tokens",
    "queue_s": "outrider_tenant_queue_seconds",
    "parked": "outrider_tenant_parked",
}


async def publish_always(generation: Generation, instruments: Instruments) -> None:
    """Publishes every PERIOD_S seconds until it is cancelled."""
    while True:
        publish(generation, instruments)
        await asyncio.sleep(PERIOD_S)


def publish(generation: Generation, instruments: Instruments) -> None:
    """Publishes all counters, and the timings of the requests that were answered since the last call."""
    totals, admission = generation.totals, generation.admission
    for kind, stats in totals.stats().items():
        _count(instruments, kind, stats, vllm_labels(generation))
    answered = [totals.answered.popleft() for _ in range(len(totals.answered))]
    for timing in answered:
        _observe(instruments, timing, generation.settings.model)
    publish_as_vllm(generation, instruments, answered)
    in_force = totals.in_force()
    for reason in DepthReason:
        depths = in_force.get(reason)
        instruments.set("outrider_sequences", depths.sequences if depths else 0, reason=reason)
        instruments.set("outrider_depth", depths.mean_depth if depths else 0.0, reason=reason)
    for of, draft, rollout in generation.rollouts:
        labels = {"task": totals.label(of.task), "verification": of.rule, "draft": draft}
        instruments.set("outrider_rollout_share", rollout.share, **labels)
        for share, times in rollout.changes.items():
            instruments.total("outrider_rollout_changes", times, **labels, share=f"{share:g}")
    for tenant, counts in generation.tenants.counts().items():
        for what, metric in OF_TENANT.items():
            instruments.total(metric, getattr(counts, what), tenant=tenant)
        for limit, times in counts.refusals.items():
            instruments.total("outrider_tenant_refusals", times, tenant=tenant, limit=limit)
    if generation.auditor is not None:
        audits = generation.auditor.counts
        for outcome, answers in audits.answers.items():
            instruments.total("outrider_audits", answers, outcome=outcome)
        instruments.total("outrider_audited_tokens", audits.tokens)
        instruments.total("outrider_audit_near_ties", audits.near_ties)
        instruments.total("outrider_audit_wrong_tokens", audits.wrong)
    instruments.set("outrider_requests_running", admission.running)
    instruments.set("outrider_requests_waiting", admission.waiting)
    instruments.set("outrider_requests_parked", admission.parked)
    if (plain_rate := generation.plain_rate()) is not None:
        instruments.set("outrider_plain_tokens_per_second", plain_rate)


def _count(instruments: Instruments, kind: StatsKey, stats: Stats, of_vllm: dict[str, str]) -> None:
    labels = {"task": kind.task, "drafter": kind.drafter}
    for counter in COUNTERS:
        if counter.metric:
            known = {**labels, **of_vllm}
            told = {name: known[name] for name in drafted_labels(counter.metric)}
            instruments.total(counter.metric, getattr(stats, counter.name), **told)
    for position in range(max(stats.lengths, default=0)):
        accepted = stats.accepted_at(position)
        name = "vllm_spec_decode_num_accepted_tokens_per_pos"
        instruments.total(name, accepted, **labels, **of_vllm, position=str(position))
    for drafter, counts in stats.drafted_by.items():
        for what, name in DRAFTED_BY.items():
            instruments.total(name, counts[what], **labels, drafted_by=drafter)
    for drafter, reasons in stats.routed.items():
        for reason, times in reasons.items():
            instruments.total("outrider_routes", times, **labels, routed_to=drafter, reason=reason)
    for drafter, counts in stats.judged.items():
        for what, name in JUDGED.items():
            instruments.total(name, counts[what], **labels, judged=drafter)
    for (to, reason), times in stats.transitions.items():
        instruments.total("outrider_transitions", times, **labels, to=to, reason=reason)
    for reason, times in stats.failures.items():
        instruments.total("outrider_failed_sequences", times, **labels, reason=reason)
    instruments.total("outrider_ahead_hits", stats.ahead_hits.total(), **labels)
    instruments.total("outrider_fallbacks", stats.late_drafts, **labels, reason=DepthReason.LATE)
    instruments.total("outrider_fallbacks", stats.lost_drafts, **labels, reason=DepthReason.LOST)
    instruments.total("outrider_fallbacks", stats.empty_drafts, **labels, reason=DepthReason.EMPTY)


def _observe(instruments: Instruments, timing: Timing, model: str) -> None:
    labels = {
        "gen_ai_operation_name": timing.operation,
        "gen_ai_request_model": model,
        "gen_ai_provider_name": PROVIDER,
    }
    times = {
        "gen_ai_server_time_to_first_token_seconds": timing.first_token_s,
        "gen_ai_server_time_per_output_token_seconds": timing.per_output_token_s,
    }
    for name, seconds in times.items():
        if seconds is not None:
            instruments.observe(name, seconds, **labels)
    if timing.queue_s is not None:
        instruments.observe("outrider_queue_seconds", timing.queue_s)
    assert timing.total_s is not None
    error = timing.error or ""
    instruments.observe("gen_ai_server_request_duration_seconds", timing.total_s, **labels, error_type=error)
