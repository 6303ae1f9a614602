"""Publishes metrics of requests under vLLM's names, so that dashboards for vLLM show the service."""

from collections.abc import Iterable
from statistics import fmean

from gateway.generation.generation import Generation
from gateway.generation.totals import Timing
from gateway.workers.fleet import Fleet
from outrider.telemetry.instruments import Instruments

ENGINE = "0"  # label of vLLM's first engine; to callers all targets of a gateway are one engine


def vllm_labels(generation: Generation) -> dict[str, str]:
    """Returns the labels of all of vLLM's metrics."""
    return {"model_name": generation.settings.model, "engine": ENGINE}


def publish_as_vllm(generation: Generation, instruments: Instruments, answered: Iterable[Timing]) -> None:
    """Publishes the load, and the requests that were answered since the last call."""
    labels = vllm_labels(generation)
    tokens = sum(stats.tokens for stats in generation.totals.stats().values())
    instruments.total("vllm_generation_tokens", tokens, **labels)
    instruments.set("vllm_num_requests_running", generation.admission.running, **labels)
    instruments.set("vllm_num_requests_waiting", generation.admission.waiting, **labels)
    if (usage := _cache_usage(generation.fleet)) is not None:
        instruments.set("vllm_kv_cache_usage_perc", usage, **labels)
    for timing in answered:
        _observe(instruments, timing, labels)


def _observe(instruments: Instruments, timing: Timing, labels: dict[str, str]) -> None:
    for reason, answers in timing.ends.items():
        instruments.add("vllm_request_success", answers, **labels, finished_reason=reason)
    if timing.first_token_s is None or timing.queue_s is None or timing.total_s is None:
        return  # no answer began
    instruments.add("vllm_prompt_tokens", timing.prompt_tokens, **labels)
    instruments.add("vllm_prefix_cache_queries", timing.prompt_tokens, **labels)
    instruments.add("vllm_prefix_cache_hits", timing.cached_tokens, **labels)
    instruments.observe("vllm_time_to_first_token_seconds", timing.first_token_s, **labels)
    instruments.observe("vllm_request_queue_time_seconds", timing.queue_s, **labels)
    prefill_s, decode_s = timing.first_token_s - timing.queue_s, timing.total_s - timing.first_token_s
    instruments.observe("vllm_request_prefill_time_seconds", prefill_s, **labels)
    if timing.error is not None:
        return  # vLLM observes the metrics below for complete answers only
    instruments.observe("vllm_request_decode_time_seconds", decode_s, **labels)
    instruments.observe("vllm_e2e_request_latency_seconds", timing.total_s, **labels)
    instruments.observe("vllm_request_prompt_tokens", timing.prompt_tokens, **labels)
    instruments.observe("vllm_request_generation_tokens", timing.tokens, **labels)
    if timing.per_output_token_s is not None:
        instruments.observe("vllm_request_time_per_output_token_seconds", timing.per_output_token_s, **labels)


def _cache_usage(fleet: Fleet) -> float | None:
    """Returns the mean used share of the targets' KV caches; None: no target has reported yet.

    An idle target reports nothing, so its last report counts.
    """
    loads = [link.load for link in fleet.links() if link.worker.role == "target" and link.load]
    shares = [1 - load.free_blocks / load.total_blocks for load in loads if load.total_blocks]
    return fmean(shares) if shares else None
