"""Place of the gateways, and which of them gets a request."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.application import app
from cluster.stop import MARGIN_S
from gateway.generation.answer_store import STORE
from gateway.tenants.shared_limits import LIMITS
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


TENANTS = "search: {keys: [sk-search], requests_per_minute: 2}\nfree: {keys: [sk-free], weight: 2}\n"


def test_gateways_share_an_actor_that_keeps_limits_if_a_tenant_has_any(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend_cluster(monkeypatch)

    def limited(tenants: str, **settings: Any) -> list[str]:
        """Returns the tenants whose limits an actor keeps."""
        (tmp_path / "tenants.yaml").write_text(tenants)
        file = {"access.tenants_file": str(tmp_path / "tenants.yaml")}
        actors = deployments(app({"target": "demo-small", **file, **settings}))["gateway"]
        kept = {actor.name: actor for actor in actors._deployment_config.deployment_actors or ()}
        return [*kept[LIMITS].init_kwargs["tenants"]] if LIMITS in kept else []

    assert limited(TENANTS, **{"gateway.replicas": "2"}) == ["search"]
    assert limited(TENANTS.splitlines()[1], **{"gateway.replicas": "2"}) == []
    assert limited(TENANTS) == []


def test_gateway_that_leaves_has_the_time_of_its_longest_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cluster(monkeypatch)
    config = gateway(request_deadline_s="90")._deployment_config
    assert config.graceful_shutdown_timeout_s == 90 + MARGIN_S


@pytest.mark.slow
def test_limit_is_given_whole_by_one_gateway_and_then_refused_by_all(tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text(TENANTS)
    settings = {
        **SERVED,
        "gateway.replicas": 2,
        "gateway.router": "session",
        "access.tenants_file": str(tmp_path / "tenants.yaml"),
    }
    with (
        serving(tmp_path, settings) as service,
        httpx.Client(base_url=service.http, timeout=LIMIT_S) as client,
    ):
        client.headers["Authorization"] = "Bearer sk-search"

        def session_of(name: str) -> str:
            """Returns the gateway that answers a session."""
            return str(client.get("/loads", headers={"x-session-id": name}).json()["gateway"])

        def asked(name: str) -> int:
            """Returns the status of a request of a session."""
            body = {"prompt": "x", "max_tokens": 1}
            return client.post("/v1/completions", json=body, headers={"x-session-id": name}).status_code

        wait_until(lambda: len({session_of(f"session {number}") for number in range(SESSIONS)}) == 2)
        by_gateway = {session_of(name): name for name in (f"session {number}" for number in range(SESSIONS))}
        first, second = by_gateway.values()
        assert [asked(first) for _ in range(3)] == [200, 200, 429]
        assert asked(second) == 429


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
