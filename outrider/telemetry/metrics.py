"""Every metric of the service, in one table. Names without Ray's prefix ``ray_``."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# Those of OpenTelemetry's semantic conventions for generative AI, seconds.
REQUEST_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
OUTPUT_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

STEP_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024)

ANSWER = ("gen_ai_operation_name", "gen_ai_request_model", "gen_ai_provider_name")
DRAFTED = ("task", "drafter")

# What sets the depth of a sequence's next Draft.
REASONS = {
    "measured": "the pace, by measured costs and acceptance",
    "thresholds": "the pace, by its fixed rules",
    "trial": "the pace, to see what the other kind of step costs",
    "fixed": "the request",
    "off": "the request, or there is no drafter",
    "late Draft": "a Draft missed its deadline and is waited for",
    "lost draft worker": "the draft worker was lost and another is looked for",
    "empty Drafts": "the drafter had nothing to say several times in a row and is seldom asked",
    "last token": "no room is left for a Draft",
}


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()  # beside those of Ray and Serve
    buckets: tuple[float, ...] = ()  # of a histogram: upper bounds

    @property
    def exported(self) -> tuple[str, ...]:
        """Names of its series as Ray's exporter writes them."""
        endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
        return tuple(f"ray_{self.name}{ending}" for ending in endings[self.kind])


def _counter(name: str, unit: str, meaning: str, labels: Iterable[str] = ()) -> Metric:
    return Metric(name, "counter", unit, meaning, tuple(labels))


def _gauge(name: str, unit: str, meaning: str, labels: Iterable[str] = ()) -> Metric:
    return Metric(name, "gauge", unit, meaning, tuple(labels))


def _histogram(name: str, meaning: str, labels: Iterable[str], buckets: tuple[float, ...]) -> Metric:
    return Metric(name, "histogram", "seconds", meaning, tuple(labels), buckets)


OF_GATEWAYS = (
    _histogram(
        "gen_ai_server_request_duration_seconds",
        "from the arrival of a request that nothing was wrong with to its last token",
        (*ANSWER, "error_type"),
        REQUEST_BUCKETS,
    ),
    _histogram(
        "gen_ai_server_time_to_first_token_seconds",
        "from arrival to the first token, the queue included",
        ANSWER,
        FIRST_TOKEN_BUCKETS,
    ),
    _histogram(
        "gen_ai_server_time_per_output_token_seconds",
        "of a whole answer: from its first token to its last, per token after the first",
        ANSWER,
        OUTPUT_TOKEN_BUCKETS,
    ),
    _histogram("outrider_queue_seconds", "that a request waited for its turn", (), FIRST_TOKEN_BUCKETS),
    _gauge("outrider_requests_running", "requests", "that are being answered"),
    _gauge("outrider_requests_waiting", "requests", "in the gateway's queue"),
    _counter("vllm_spec_decode_num_drafts", "rounds", "Drafts that were verified", DRAFTED),
    _counter("vllm_spec_decode_num_draft_tokens", "tokens", "in these Drafts", DRAFTED),
    _counter("vllm_spec_decode_num_accepted_tokens", "tokens", "of them that stand", DRAFTED),
    _counter(
        "vllm_spec_decode_num_accepted_tokens_per_pos",
        "tokens",
        "of them at each position of a Draft, the first being 0",
        (*DRAFTED, "position"),
    ),
    _counter(
        "outrider_verified_tokens",
        "tokens",
        "drafted ones whose position was reached; acceptance rate = accepted / verified",
        DRAFTED,
    ),
    _counter("outrider_tokens", "tokens", "committed", DRAFTED),
    _counter(
        "outrider_target_passes",
        "passes",
        "of the target that answered a sequence, with Draft or without",
        DRAFTED,
    ),
    _counter(
        "outrider_draft_seconds", "seconds", "that rounds waited for a Draft, the wire included", DRAFTED
    ),
    _counter("outrider_target_seconds", "seconds", "that sequences waited for the target, likewise", DRAFTED),
    _counter("outrider_prepared_verdicts", "verdicts", "for which the draft worker had prepared", DRAFTED),
    _counter("outrider_ahead_hits", "verdicts", "of them that were foreseen", DRAFTED),
    _counter(
        "outrider_continued_rounds",
        "rounds",
        "for which the target had the Draft before the Verdict fell",
        DRAFTED,
    ),
    _counter(
        "outrider_draft_saved_seconds",
        "seconds",
        "of the draft's steps that were over when the Draft was asked for",
        DRAFTED,
    ),
    _counter("outrider_wasted_tokens", "tokens", "drafted for verdicts that did not fall", DRAFTED),
    _counter(
        "outrider_transitions",
        "transitions",
        "of a sequence from plain decoding to rounds (on) and back (off), and what decided it",
        (*DRAFTED, "to", "reason"),
    ),
    _counter(
        "outrider_fallbacks",
        "fallbacks",
        "to plain decoding because a Draft was late, or the draft worker lost or without anything to say",
        (*DRAFTED, "reason"),
    ),
    _counter("outrider_reopenings", "reopenings", "of a sequence whose target worker was lost", DRAFTED),
    _counter(
        "outrider_failed_sequences",
        "sequences",
        "that a target's engine could not go on with, or with which max_losses targets were lost",
        (*DRAFTED, "reason"),
    ),
    _gauge(
        "outrider_depth",
        "tokens",
        "mean depth in force over sequences: "
        + "; ".join(f"{reason}: {meaning}" for reason, meaning in REASONS.items()),
        ("reason",),
    ),
    _gauge("outrider_sequences", "sequences", "under way, by what decides their depth", ("reason",)),
    _gauge(
        "outrider_plain_tokens_per_second",
        "tokens per second",
        "that plain decoding would give the sequences under way, by the costs that the pace has measured",
    ),
)

OF_WORKERS = (
    _histogram(
        "outrider_step_seconds", "of one step: build, forward pass, sampling", ("role",), STEP_BUCKETS
    ),
    _counter("outrider_steps", "steps", "of the engine", ("role",)),
    _counter("outrider_busy_seconds", "seconds", "in steps", ("role",)),
    _counter("outrider_forward_seconds", "seconds", "of them in the forward pass", ("role",)),
    _counter("outrider_sample_seconds", "seconds", "of them in choosing tokens", ("role",)),
    _counter("outrider_step_tokens", "tokens", "fed in steps, prompts included", ("role",)),
    _counter("outrider_works", "pieces of work", "that were answered", ("role",)),
    _counter("outrider_blamed_sequences", "sequences", "that a step could not go on with", ("role",)),
    _counter("outrider_work_queue_seconds", "seconds", "that they waited for their first step", ("role",)),
    _gauge("outrider_sequences_running", "sequences", "with work that hold cache", ("role",)),
    _gauge("outrider_sequences_waiting", "sequences", "with work that wait for cache", ("role",)),
    _gauge("outrider_cache_blocks_used", "blocks", "of the paged cache that sequences hold", ("role",)),
    _gauge(
        "outrider_cache_blocks_free",
        "blocks",
        "that can be allocated, those kept for their prefix included",
        ("role",),
    ),
    _gauge("outrider_device_memory_free_bytes", "bytes", "of the device that nobody has taken", ("role",)),
)
