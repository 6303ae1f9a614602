"""A real Prometheus scrapes a running service and answers every query of the dashboard and the rules."""

import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from tests.support.patience import wait_until
from tests.support.queries import (
    NOT_OURS,
    QUERIES,
    as_grafana_asks,
    queries_of_serve_llm,
    queries_of_the_dashboard,
)
from tests.support.running import Service, free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="NOT RUN: Debian's package prometheus is missing"
    ),
]
# What a service that is well has none of, or one without a GPU.
MAY_BE_EMPTY = {
    *(f"Audited answers {query}" for query in "ABCD"),  # audits are off unless they are asked for
    *(f"Fallbacks, reopenings and failures {query}" for query in "ABCD"),
    "Guesses of drafters that do not draft A",
    *(f"New drafts: share of the sequences {query}" for query in "AB"),
    "Requests by outcome B",
    *(f"Second targets {query}" for query in "ABC"),  # the service has a single target
    *(f"Requests of tenants {query}" for query in "BC"),
    "Speculation on and off A",
    "Steps on GPUs by path A",
}

FORCED = {"max_tokens": 8, "structured_outputs": {"choice": ["reminder"]}}  # tokens by a grammar


@pytest.fixture(scope="module")
def prometheus(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder, address = tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{free_port()}"
    targets = [{"targets": [service.metrics.removeprefix("http://").removesuffix("/metrics")]}]
    config = {"scrape_configs": [{"job_name": "ray", "scrape_interval": "1s", "static_configs": targets}]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("w") as log, httpx.Client(base_url=f"http://{address}") as client:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: is_ready(client))
            yield client
        finally:
            process.terminate()
            process.wait(10)


def is_ready(prometheus: httpx.Client) -> bool:
    try:
        return prometheus.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def answered(prometheus: httpx.Client, query: str) -> list[Any]:
    query = query.replace("$__rate_interval", "30s")
    body = prometheus.get("/api/v1/query", params={"query": query}).json()
    assert body["status"] == "success", (query, body)
    result: list[Any] = body["data"]["result"]
    return result


def test_dashboard_queries_are_answered(client: httpx.Client, prometheus: httpx.Client) -> None:
    empty = queries_of_the_dashboard().keys() - MAY_BE_EMPTY

    def shown() -> bool:
        for fields in ({"max_tokens": 60}, FORCED):
            client.post("/v1/completions", json={"prompt": '{"name": "', "task": "json", **fields})
        empty.difference_update([name for name in empty if answered(prometheus, QUERIES[name])])
        return not empty

    wait_until(shown, what=lambda: f"shows nothing: {empty}")
    for query in QUERIES.values():
        answered(prometheus, query)
    alerts = {name for name in QUERIES if name.startswith("Outrider")} - {"OutriderSlowerThanPlain"}
    assert not [name for name in alerts if answered(prometheus, QUERIES[name])]


def test_panels_of_rays_dashboard_have_values(client: httpx.Client, prometheus: httpx.Client) -> None:
    queries = {
        title: as_grafana_asks(query)
        for title, query in queries_of_serve_llm().items()
        if not any(beginning in query for beginning in NOT_OURS)
    }
    empty = {*queries}
    prompt = "The same words again. " * 8  # several blocks of the cache, so that later prompts hit them

    def shown() -> bool:
        client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8})
        empty.difference_update([title for title in empty if answered(prometheus, queries[title])])
        return not empty

    wait_until(shown, what=lambda: f"shows nothing: {empty}")
