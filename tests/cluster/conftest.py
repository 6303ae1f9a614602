"""One real service for this folder."""

import warnings
from collections.abc import Iterator

import httpx
import pytest

from tests.fakes.collector import Collector, collecting
from tests.support.patience import LIMIT_S
from tests.support.running import Service, serving
from tests.support.served import SERVED

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve's own use of pydantic is deprecated
    import ray.serve  # noqa: F401


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Service]:
    """It sends the collector the traces of requests that come with a sampled trace context."""
    folder = tmp_path_factory.mktemp("elsewhere")  # the command works from any folder
    tracing = {
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.address,
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        "OTEL_BSP_SCHEDULE_DELAY": "200",  # milliseconds
    }
    with serving(folder, SERVED, environment=tracing) as service:
        yield service


@pytest.fixture(scope="session")
def client(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.http, timeout=LIMIT_S) as client:
        yield client
