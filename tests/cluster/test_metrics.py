"""What Prometheus reads from the exporter of a node, beside what requests were told."""

from collections import defaultdict
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from outrider.telemetry.metrics import OF_GATEWAYS, OF_WORKERS
from tests.support.patience import wait_until
from tests.support.running import Service
from tests.support.series import series_of

# They have no series before the first time.
RARE = {"outrider_fallbacks", "outrider_reopenings", "outrider_transitions", "outrider_ahead_hits"}
RARE |= {"outrider_continued_rounds", "outrider_wasted_tokens", "outrider_draft_saved_seconds"}
RARE |= {"outrider_prepared_verdicts"}  # only if the draft worker drafts, and not a head
RARE |= {"outrider_failed_sequences", "outrider_blamed_sequences", "outrider_gpu_steps"}
RARE |= {"outrider_judged_reached_tokens", "outrider_judged_correct_tokens"}  # only with several drafters
RARE |= {f"outrider_tenant_{name}" for name in ("queue_seconds", "refusals", "parked")}  # only under load
RARE |= {"vllm_prefix_cache_hits"}  # only with prompts of several blocks
RARE |= {"outrider_hedges", "outrider_moves", "outrider_second_target_seconds"}
RARE |= {"outrider_audits", "outrider_audited_tokens", "outrider_audit_near_ties"}  # only with audits
RARE |= {"outrider_audit_wrong_tokens"}
RARE |= {"outrider_rollout_share", "outrider_rollout_changes"}  # only with a new draft


def scraped(service: Service) -> dict[str, dict[str, float]]:
    """Returns the sum of the values per task, by series name."""
    series: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(httpx.get(service.metrics).text):
        for sample in family.samples:
            series[sample.name][sample.labels.get("task", "")] += sample.value
    return series


def test_exporter_has_every_metric_and_the_sums_of_the_usage(client: httpx.Client, service: Service) -> None:
    told: dict[str, float] = defaultdict(float)
    always = {"mode": "fixed", "depth": 4}  # the pace may decode plainly, and then no guess is accepted
    for seed, mode in enumerate(({}, {}, always, always)):
        fields: dict[str, Any] = {"prompt": '{"name": "', "max_tokens": 40, "seed": seed, "task": "counted"}
        fields["speculation"] = {"report": True, **mode}
        usage = client.post("/v1/completions", json=fields).json()["usage"]
        told["outrider_tokens_total"] += usage["completion_tokens"]
        for name in ("rounds", "drafted", "reached", "accepted", "target_passes"):
            told[name] += usage["speculation"][name]
    forced: dict[str, Any] = {
        "prompt": '{"name": "',
        "max_tokens": 8,
        "structured_outputs": {"choice": ["reminder"]},
    }
    forced["speculation"] = {"report": True}
    assert client.post("/v1/completions", json=forced).json()["usage"]["speculation"]["forced"] > 0
    expected = {
        "ray_outrider_tokens_total": told["outrider_tokens_total"],
        "ray_vllm_spec_decode_num_drafts_total": told["rounds"],
        "ray_vllm_spec_decode_num_draft_tokens_total": told["drafted"],
        "ray_vllm_spec_decode_num_accepted_tokens_total": told["accepted"],
        "ray_vllm_spec_decode_num_accepted_tokens_per_pos_total": told["accepted"],
        "ray_outrider_reached_tokens_total": told["reached"],
        "ray_outrider_target_passes_total": told["target_passes"],
    }
    names = {
        name
        for metric in (*OF_GATEWAYS, *OF_WORKERS)
        if metric.name not in RARE
        for name in series_of(metric)
    }
    found: dict[str, Any] = {}

    def reported() -> bool:
        """Ray has passed on what was recorded."""
        series = scraped(service)
        counted = {name: series[name]["counted"] for name in expected}
        found.update(missing=names - series.keys(), counted=counted)
        return found == {"missing": set(), "counted": expected}

    wait_until(reported, what=lambda: f"{found}, not {expected}")
