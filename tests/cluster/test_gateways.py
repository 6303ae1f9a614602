"""Place of the gateways, and which of them gets a request."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.application import app
from gateway.generation.answer_store import STORE
from tests.support.applications import deployments, pretend_cluster
from tests.support.patience import LIMIT_S, wait_until
from tests.support.running import serving
from tests.support.served import SERVED

SESSIONS = 20


def gateway(**settings: Any) -> Any:
    """Returns the deployment of the gateways with these settings."""
    fields = {"target": "demo-small", **{f"gateway.{name}": value for name, value in settings.items()}}
    return deployments(app(fields))["gateway"]


@pytest.mark.parametrize(("router", "is_by_session"), [("least", False), ("session", True)])
def test_router_of_the_gateways_is_what_the_setting_names(
    monkeypatch: pytest.MonkeyPatch, router: str, is_by_session: bool
) -> None:
    pretend_cluster(monkeypatch)
    config = gateway(router=router)._deployment_config.request_router_config
    assert (config.get_request_router_class().__name__ == "ConsistentHashRouter") is is_by_session


def test_gateways_take_no_cpus_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cluster(monkeypatch)
    assert gateway().ray_actor_options["num_cpus"] == 0


def test_gateways_take_the_cpus_that_the_cluster_has(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cluster(monkeypatch, CPU=4.0)
    assert gateway(cpus="2", replicas="2").ray_actor_options["num_cpus"] == 2
    with pytest.raises(ValueError, match="the replicas need 6 of resource 'CPU', the cluster has 4"):
        gateway(cpus="2", replicas="3")


@pytest.mark.slow
def test_session_stays_at_its_gateway_and_sessions_share_the_gateways(tmp_path: Path) -> None:
    settings = {**SERVED, "gateway.replicas": 2, "gateway.router": "session"}
    with (
        serving(tmp_path, settings) as service,
        httpx.Client(base_url=service.http, timeout=LIMIT_S) as client,
    ):

        def gateways() -> list[str]:
            """Returns the name of the gateway that each session meets."""
            names = [f"session {number}" for number in range(SESSIONS)]
            answers = [client.get("/loads", headers={"x-session-id": name}) for name in names]
            return [answer.json()["gateway"] for answer in answers]

        wait_until(lambda: len({*gateways()}) == 2)
        first = gateways()
        assert [gateways() for _ in range(3)] == [first] * 3


def test_gateways_share_an_actor_that_keeps_responses_unless_there_is_one_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_cluster(monkeypatch)

    def actors(**settings: Any) -> list[str]:
        return [actor.name for actor in gateway(**settings)._deployment_config.deployment_actors or ()]

    assert actors(replicas="2") == [STORE]
    assert actors(replicas="2", stored_answer_bytes="0") == []
    assert actors() == []


@pytest.mark.slow
def test_response_that_one_gateway_kept_is_found_by_the_other_gateway(tmp_path: Path) -> None:
    settings = {**SERVED, "gateway.replicas": 2, "gateway.router": "session"}
    with (
        serving(tmp_path, settings) as service,
        httpx.Client(base_url=service.http, timeout=LIMIT_S) as client,
    ):
        ask = {"input": "Hi", "max_output_tokens": 4}
        kept = client.post("/v1/responses", json=ask).json()["id"]
        met = set[str]()

        def is_found_everywhere() -> bool:
            """Asks as a further session, which may meet the other gateway."""
            session = {"x-session-id": f"session {len(met)} {time.monotonic()}"}
            met.add(client.get("/loads", headers=session).json()["gateway"])
            assert client.get(f"/v1/responses/{kept}", headers=session).json()["id"] == kept
            return len(met) == 2

        wait_until(is_found_everywhere)
        more = client.post("/v1/responses", json={**ask, "previous_response_id": kept})
        assert more.json()["previous_response_id"] == kept
