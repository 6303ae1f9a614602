"""Table of all metrics, named without Ray's prefix ``ray_``."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from outrider.telemetry.counters import COUNTERS

# seconds; the buckets of OpenTelemetry's semantic conventions for generative AI
REQUEST_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
OUTPUT_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

# vLLM's own buckets, in seconds or tokens
VLLM_FIRST_TOKEN_BUCKETS = (*FIRST_TOKEN_BUCKETS, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
VLLM_OUTPUT_TOKEN_BUCKETS = (*OUTPUT_TOKEN_BUCKETS, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
VLLM_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
VLLM_TOKEN_BUCKETS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))

STEP_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024)

ANSWER = ("gen_ai_operation_name", "gen_ai_request_model", "gen_ai_provider_name")
DRAFTED = ("task", "drafter")
TENANT = ("tenant",)
ROLLED_OUT = ("task", "verification", "draft")
VLLM = ("model_name", "engine")


def drafted_labels(name: str) -> tuple[str, ...]:
    """Returns the labels of a metric of Drafts; vLLM's metrics add the labels that its dashboards query."""
    return (*DRAFTED, *VLLM) if name.startswith("vllm_") else DRAFTED


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()  # labels in addition to those of Ray and Serve
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram


def _counter(name: str, unit: str, meaning: str, labels: Iterable[str] = ()) -> Metric:
    return Metric(name, "counter", unit, meaning, tuple(labels))


def _gauge(name: str, unit: str, meaning: str, labels: Iterable[str] = ()) -> Metric:
    return Metric(name, "gauge", unit, meaning, tuple(labels))


def _histogram(
    name: str, meaning: str, labels: Iterable[str], buckets: tuple[float, ...], unit: str = "seconds"
) -> Metric:
    return Metric(name, "histogram", unit, meaning, tuple(labels), buckets)


# Names, labels and buckets are vLLM's, for dashboards that query them, such as Ray's "Serve LLM".
AS_VLLM = (
    _counter("vllm_prompt_tokens", "tokens", "tokens of prompts whose answers began", VLLM),
    _counter("vllm_generation_tokens", "tokens", "committed tokens", VLLM),
    _counter(
        "vllm_request_success",
        "answers",
        "answers that ended, by how: `stop`, `length`, `abort` (the client has gone) or `error`",
        (*VLLM, "finished_reason"),
    ),
    _counter("vllm_prefix_cache_queries", "tokens", "tokens of prompts whose answers began", VLLM),
    _counter("vllm_prefix_cache_hits", "tokens", "tokens of these that the target had cached before", VLLM),
    _histogram(
        "vllm_time_to_first_token_seconds",
        "time of a request from its arrival to its first token, the queue included",
        VLLM,
        VLLM_FIRST_TOKEN_BUCKETS,
    ),
    _histogram(
        "vllm_request_time_per_output_token_seconds",
        "time per token of an answer, after its first token",
        VLLM,
        VLLM_OUTPUT_TOKEN_BUCKETS,
    ),
    _histogram(
        "vllm_e2e_request_latency_seconds",
        "time of a request from its arrival to its last token",
        VLLM,
        VLLM_REQUEST_BUCKETS,
    ),
    _histogram(
        "vllm_request_queue_time_seconds",
        "time that a request spent in the gateway's queue",
        VLLM,
        VLLM_REQUEST_BUCKETS,
    ),
    _histogram(
        "vllm_request_prefill_time_seconds",
        "time of a request from the end of its queue to its first token",
        VLLM,
        VLLM_REQUEST_BUCKETS,
    ),
    _histogram(
        "vllm_request_decode_time_seconds",
        "time of a request from its first token to its last token",
        VLLM,
        VLLM_REQUEST_BUCKETS,
    ),
    _histogram(
        "vllm_request_prompt_tokens", "tokens of a request's prompts", VLLM, VLLM_TOKEN_BUCKETS, "tokens"
    ),
    _histogram(
        "vllm_request_generation_tokens", "tokens of a request's answers", VLLM, VLLM_TOKEN_BUCKETS, "tokens"
    ),
    _gauge("vllm_num_requests_running", "requests", "requests that are being answered", VLLM),
    _gauge("vllm_num_requests_waiting", "requests", "requests in the gateway's queue", VLLM),
    _gauge(
        "vllm_kv_cache_usage_perc",
        "share",
        "share of the cache in use, from 0 to 1: mean of the targets' last reports",
        VLLM,
    ),
)

OF_GATEWAYS = (
    *AS_VLLM,
    _histogram(
        "gen_ai_server_request_duration_seconds",
        "time of a request that was accepted, from its arrival to its last token",
        (*ANSWER, "error_type"),
        REQUEST_BUCKETS,
    ),
    _histogram(
        "gen_ai_server_time_to_first_token_seconds",
        "time of a request from its arrival to its first token, the queue included",
        ANSWER,
        FIRST_TOKEN_BUCKETS,
    ),
    _histogram(
        "gen_ai_server_time_per_output_token_seconds",
        "time per token of an answer, after its first token",
        ANSWER,
        OUTPUT_TOKEN_BUCKETS,
    ),
    _histogram(
        "outrider_queue_seconds", "time that a request spent in the gateway's queue", (), FIRST_TOKEN_BUCKETS
    ),
    _gauge("outrider_requests_running", "requests", "requests that are being answered"),
    _gauge("outrider_requests_waiting", "requests", "requests in the gateway's queue"),
    _gauge("outrider_requests_parked", "requests", "batch requests that gave their permits away for a while"),
    _counter(
        "outrider_tenant_requests",
        "requests",
        "requests of a tenant, refused requests included; `unnamed`: the key has no name",
        TENANT,
    ),
    _counter("outrider_tenant_prompt_tokens", "tokens", "tokens of prompts that had a permit", TENANT),
    _counter("outrider_tenant_answer_tokens", "tokens", "committed tokens of answers", TENANT),
    _counter(
        "outrider_tenant_queue_seconds",
        "seconds",
        "time that requests with a permit have waited for it in the queue",
        TENANT,
    ),
    _counter(
        "outrider_tenant_parked",
        "times",
        "times that a batch request gave its permit to an interactive request, for a while",
        TENANT,
    ),
    _counter(
        "outrider_tenant_refusals",
        "requests",
        "refused requests, by the limit that was reached; `queue`: the gateway's queue was full",
        (*TENANT, "limit"),
    ),
    *(
        _counter(counter.metric, counter.unit, counter.meaning, drafted_labels(counter.metric))
        for counter in COUNTERS
        if counter.metric
    ),
    _counter(
        "vllm_spec_decode_num_accepted_tokens_per_pos",
        "tokens",
        "accepted drafted tokens, by position in the Draft; the first is 0",
        (*DRAFTED, *VLLM, "position"),
    ),
    _counter(
        "outrider_drafted_by_rounds",
        "rounds",
        "Drafts that the target verified, by the drafter that made them: a mixed drafter has two",
        (*DRAFTED, "drafted_by"),
    ),
    _counter(
        "outrider_drafted_by_reached_tokens",
        "tokens",
        "tokens of these Drafts whose position was reached",
        (*DRAFTED, "drafted_by"),
    ),
    _counter(
        "outrider_drafted_by_accepted_tokens",
        "tokens",
        "accepted tokens of these Drafts",
        (*DRAFTED, "drafted_by"),
    ),
    _counter(
        "outrider_routes",
        "choices",
        "times that a drafter was taken to draft a sequence, at its start or later, and why",
        (*DRAFTED, "routed_to", "reason"),
    ),
    _counter(
        "outrider_judged_reached_tokens",
        "tokens",
        "tokens asked of drafters that do not draft, up to the first wrong token",
        (*DRAFTED, "judged"),
    ),
    _counter(
        "outrider_judged_correct_tokens",
        "tokens",
        "tokens asked of drafters that do not draft, and correct",
        (*DRAFTED, "judged"),
    ),
    _gauge(
        "outrider_rollout_share",
        "share",
        "share of new sequences for which a new draft drafts; 0: it is only judged",
        ROLLED_OUT,
    ),
    _counter(
        "outrider_rollout_changes",
        "changes",
        "times that a new draft was given this share of the sequences; 0: it went back",
        (*ROLLED_OUT, "share"),
    ),
    _counter("outrider_ahead_hits", "verdicts", "prepared verdicts that the draft worker foresaw", DRAFTED),
    _counter(
        "outrider_transitions",
        "transitions",
        "changes of a sequence from plain decoding to rounds (on) and back (off), by what decided them",
        (*DRAFTED, "to", "reason"),
    ),
    _counter(
        "outrider_fallbacks",
        "fallbacks",
        "falls back to plain decoding: a Draft was late or empty, or the draft worker was lost",
        (*DRAFTED, "reason"),
    ),
    _counter(
        "outrider_failed_sequences",
        "sequences",
        "sequences that failed: the target's engine could not go on, or max_losses targets were lost",
        (*DRAFTED, "reason"),
    ),
    _counter(
        "outrider_audits",
        "answers",
        "answers drawn for an audit, by outcome: `same`, `near-ties`, `differs`, or `skipped` (no other"
        " replica, or no time)",
        ("outcome",),
    ),
    _counter("outrider_audited_tokens", "tokens", "tokens of audited answers"),
    _counter(
        "outrider_audit_near_ties",
        "tokens",
        "tokens of audited answers that the auditing replica would not choose, by a margin that is rounding",
    ),
    _counter(
        "outrider_audit_wrong_tokens",
        "tokens",
        "tokens of audited answers that the auditing replica would not choose, beyond rounding",
    ),
    _gauge("outrider_depth", "tokens", "mean depth in force, by what decides it", ("reason",)),
    _gauge("outrider_sequences", "sequences", "running sequences, by what decides their depth", ("reason",)),
    _gauge(
        "outrider_plain_tokens_per_second",
        "tokens per second",
        "speed that plain decoding would have, by measured costs over ten seconds of steps; none until known",
    ),
)

OF_WORKERS = (
    _histogram(
        "outrider_step_seconds",
        "time of one step: build, forward pass, sampling",
        ("role",),
        STEP_BUCKETS,
    ),
    _counter("outrider_steps", "steps", "steps of the engine", ("role",)),
    _counter(
        "outrider_gpu_steps",
        "steps",
        "steps on a GPU, by path: a `graph` is fastest, `kernels` follow, `gathered` blocks are slow",
        ("role", "path"),
    ),
    _counter("outrider_busy_seconds", "seconds", "time in steps", ("role",)),
    _counter("outrider_forward_seconds", "seconds", "time in the forward passes of steps", ("role",)),
    _counter("outrider_sample_seconds", "seconds", "time in which steps chose tokens", ("role",)),
    _counter("outrider_step_tokens", "tokens", "tokens fed in steps, prompts included", ("role",)),
    _counter("outrider_works", "pieces of work", "pieces of work that the engine answered", ("role",)),
    _counter(
        "outrider_blamed_sequences", "sequences", "sequences with which a step could not go on", ("role",)
    ),
    _counter("outrider_work_queue_seconds", "seconds", "time that work waited for its first step", ("role",)),
    _gauge("outrider_sequences_running", "sequences", "sequences with work that hold cache", ("role",)),
    _gauge("outrider_sequences_waiting", "sequences", "sequences with work that wait for cache", ("role",)),
    _gauge("outrider_cache_blocks_used", "blocks", "cache blocks that sequences hold", ("role",)),
    _gauge(
        "outrider_cache_blocks_free",
        "blocks",
        "cache blocks that can be given out, those kept for their prefix included",
        ("role",),
    ),
    _gauge("outrider_device_memory_free_bytes", "bytes", "free memory of the device", ("role",)),
)
