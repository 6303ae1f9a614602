"""Grafana dashboard and Prometheus rules ask only for series that exist."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from outrider.telemetry.metrics import AS_VLLM, OF_GATEWAYS, OF_WORKERS
from tests.support.queries import MONITORING, QUERIES, queries_of_the_dashboard
from tests.support.series import series_of

METRICS = [*OF_GATEWAYS, *OF_WORKERS]
SERIES = {name for metric in METRICS for name in series_of(metric)}
LABELS = {label for metric in METRICS for label in metric.labels} | {"le", "replica"}


def unknown(query: str) -> set[str]:
    """Returns the series and labels of a query that are not exported."""
    series = set(re.findall(r"\b\w*(?:ray|outrider|vllm|gen_ai)_\w+", re.sub(r"\{.*?\}", "", query))) - SERIES
    grouped = {label.strip() for group in re.findall(r"by \((.*?)\)", query) for label in group.split(",")}
    selected = set(re.findall(r"(\w+)(?:=|!=|=~|!~)\"", query))
    return series | (grouped | selected) - LABELS


@pytest.mark.parametrize("name", QUERIES)
def test_query_names_only_what_exists(name: str) -> None:
    assert not unknown(QUERIES[name])


@pytest.mark.parametrize(
    "query",
    [
        "rate(ray_outrider_tokens[5m])",
        "sum by (tasks) (ray_outrider_depth)",
        'ray_outrider_steps_total{worker="draft"}',
        "outrider_depth",
    ],
)
def test_dashboard_check_sees_a_metric_that_does_not_exist(query: str) -> None:
    assert unknown(query)


def test_dashboard_shows_every_metric() -> None:
    """Ray's own dashboard shows those that have vLLM's names: test_serve_llm_dashboard.py."""
    shown, metrics = " ".join(queries_of_the_dashboard().values()), {*METRICS} - {*AS_VLLM}
    assert not [metric.name for metric in metrics if f"ray_{metric.name}" not in shown]


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="NOT RUN: Debian's package prometheus is missing"
)
def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    groups = yaml.safe_load((MONITORING / "rules.yaml").read_text())["spec"]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(groups))
    run = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
