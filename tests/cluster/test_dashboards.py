"""A real Prometheus scrapes a running service and answers every query of the dashboard and the rules."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from bench.running import Service, free_port
from tests.cluster.test_failures import wait_until
from tests.telemetry.test_dashboards import QUERIES, queries_of_the_dashboard

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="NOT RUN: Debian's package prometheus is missing"
    ),
]
# What a service that is well has none of.
MAY_BE_EMPTY = {
    "Fallbacks and reopenings A",
    "Fallbacks and reopenings B",
    "Requests by outcome B",
    "Speculation on and off A",
}
READY_S = 20
SCRAPED_S = 60  # within which every panel has something to show


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
            wait_until(lambda: is_ready(client), READY_S)
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


def test_every_query_is_answered(client: httpx.Client, prometheus: httpx.Client) -> None:
    panels = queries_of_the_dashboard().keys() - MAY_BE_EMPTY
    empty, deadline = panels, time.monotonic() + SCRAPED_S
    while empty and time.monotonic() < deadline:
        client.post("/v1/completions", json={"prompt": '{"name": "', "max_tokens": 60, "task": "json"})
        empty = {name for name in empty if not answered(prometheus, QUERIES[name])}
    assert not empty
    for query in QUERIES.values():
        answered(prometheus, query)
    alerts = {name for name in QUERIES if name.startswith("Outrider")} - {"OutriderSlowerThanPlain"}
    assert not [name for name in alerts if answered(prometheus, QUERIES[name])]
