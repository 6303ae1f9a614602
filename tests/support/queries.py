"""Queries of our Grafana dashboard, of our Prometheus rules and of Ray's "Serve LLM" dashboard."""

import json
from pathlib import Path

import yaml

MONITORING = Path(__file__).parent.parent.parent / "k8s" / "components" / "monitoring"


def queries_of_the_dashboard() -> dict[str, str]:
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in panels
        for target in panel["targets"]
    }


def rules() -> list[dict[str, str]]:
    manifest = yaml.safe_load((MONITORING / "rules.yaml").read_text())
    assert (manifest["kind"], manifest["metadata"]["name"]) == ("PrometheusRule", "outrider")
    return [rule for group in manifest["spec"]["groups"] for rule in group["rules"]]


QUERIES = queries_of_the_dashboard() | {rule.get("alert") or rule["record"]: rule["expr"] for rule in rules()}

# Reasons why Outrider has no equivalent of some vLLM series, by prefix of the series' name.
NOT_OURS = {
    "ray_vllm_nixl_": "prompts and answers are computed at one place",
    "ray_vllm_kv_offload_": "the cache stays on the device",
    "ray_vllm_external_prefix_cache_": "the cache stays on the device",
    "ray_vllm_num_requests_swapped": "the cache stays on the device, and vLLM itself records it no more",
}


def queries_of_serve_llm() -> dict[str, str]:
    """Returns Ray's own queries of all panels of its dashboard, by title and number."""
    from ray.dashboard.modules.metrics.dashboards.serve_llm_dashboard_panels import serve_llm_dashboard_config

    config = serve_llm_dashboard_config
    panels = [*config.panels, *(panel for row in config.rows or [] for panel in row.panels)]
    return {
        f"{panel.title} {number}": target.expr
        for panel in panels
        for number, target in enumerate(panel.targets)
    }


def as_grafana_asks(query: str) -> str:
    """Returns a query of Ray as Grafana sends it, with everything selected in its menus, over 30 s."""
    filled = query.format(global_filters='ray_io_cluster=~".*"')
    for menu in ("vllm_model_name", "workerid", "deployment"):
        filled = filled.replace(f"${menu}", ".*")
    return filled.replace("$interval", "30s")
