"""Ray's own "Serve LLM" dashboard finds the series that it asks for."""

import re

import pytest

from outrider.telemetry.metrics import AS_VLLM, OF_GATEWAYS
from tests.support.queries import NOT_OURS, queries_of_serve_llm
from tests.support.series import series_of

QUERIES = queries_of_serve_llm()
SERIES = {name for metric in OF_GATEWAYS for name in series_of(metric)}


def asked(query: str) -> set[str]:
    """Returns the series of vLLM that a query names, without those that Outrider has none of."""
    return {name for name in re.findall(r"ray_vllm_\w+", query) if not name.startswith(tuple(NOT_OURS))}


@pytest.mark.parametrize("title", QUERIES)
def test_panel_finds_its_series(title: str) -> None:
    assert asked(QUERIES[title]) <= SERIES


def test_serve_llm_panels_ask_for_every_metric_of_vllm() -> None:
    named = {name for query in QUERIES.values() for name in asked(query)}
    assert len(named) > 12
    assert [metric.name for metric in AS_VLLM if not {*series_of(metric)} & named] == []


def test_metrics_have_the_labels_by_which_panels_choose() -> None:
    """Ray itself adds WorkerId, deployment and replica."""
    of_queries = {label for query in QUERIES.values() for label in re.findall(r"(\w+)=~", query)}
    assert of_queries - {"WorkerId", "deployment"} == {"model_name"}
    assert all({"model_name", "engine"} <= {*metric.labels} for metric in AS_VLLM)
    (ended,) = (metric for metric in AS_VLLM if metric.name == "vllm_request_success")
    assert "finished_reason" in ended.labels
