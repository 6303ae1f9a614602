"""Ray's own "Serve LLM" dashboard finds the series that it asks for."""

import re

import pytest
from ray.dashboard.modules.metrics.dashboards.serve_llm_dashboard_panels import serve_llm_dashboard_config

from outrider.telemetry.metrics import AS_VLLM, OF_GATEWAYS
from tests.support.series import series_of

# what Outrider has none of, by the beginning of its name
NOT_OURS = {
    "ray_vllm_nixl_": "prompts and answers are computed at one place",
    "ray_vllm_kv_offload_": "the cache stays on the device",
    "ray_vllm_external_prefix_cache_": "the cache stays on the device",
    "ray_vllm_num_requests_swapped": "the cache stays on the device, and vLLM itself records it no more",
}
SERIES = {name for metric in OF_GATEWAYS for name in series_of(metric)}


def queries() -> dict[str, str]:
    """Returns the queries of all panels by their titles, and that of each of its menus."""
    config = serve_llm_dashboard_config
    panels = [*config.panels, *(panel for row in config.rows or [] for panel in row.panels)]
    return {
        f"{panel.title} {number}": target.expr
        for panel in panels
        for number, target in enumerate(panel.targets)
    }


def asked(query: str) -> set[str]:
    """Returns the series of vLLM that a query names, without those that Outrider has none of."""
    return {name for name in re.findall(r"ray_vllm_\w+", query) if not name.startswith(tuple(NOT_OURS))}


@pytest.mark.parametrize("title", queries())
def test_panel_finds_its_series(title: str) -> None:
    assert asked(queries()[title]) <= SERIES


def test_every_metric_of_vllm_is_asked_for_by_a_panel() -> None:
    named = {name for query in queries().values() for name in asked(query)}
    assert len(named) > 12
    assert [metric.name for metric in AS_VLLM if not {*series_of(metric)} & named] == []


def test_metrics_have_the_labels_by_which_panels_choose() -> None:
    """Ray itself adds WorkerId, deployment and replica."""
    of_queries = {label for query in queries().values() for label in re.findall(r"(\w+)=~", query)}
    assert of_queries - {"WorkerId", "deployment"} == {"model_name"}
    assert all({"model_name", "engine"} <= {*metric.labels} for metric in AS_VLLM)
    (ended,) = (metric for metric in AS_VLLM if metric.name == "vllm_request_success")
    assert "finished_reason" in ended.labels
