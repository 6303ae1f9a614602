"""What `import_path: cluster.draft` builds: one draft, and nothing of the service that it joins."""

from typing import Any

import pytest
import ray
from ray.serve._private.build_app import build_app

import cluster
from actors.worker import DraftWorker
from cluster.access import TOKEN
from cluster.preflight import Preflight, find
from cluster.settings_errors import SettingsError
from gateway.deployment import draft_deployment
from tests.support.served import CACHE, SERVED

NEXT: dict[str, Any] = {**SERVED, "joins": "next", "drafts.next.cache_memory": CACHE}


@pytest.fixture(autouse=True)
def of_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process the cluster of a service."""
    monkeypatch.setenv(TOKEN, "of the service in this test")
    monkeypatch.setattr("cluster.application.start_ray", lambda settings: None)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {}}])
    monkeypatch.setattr(ray, "cluster_resources", dict)
    # In this process, which has torch already.
    monkeypatch.setattr(Preflight, "find", lambda _, settings, **found: find(settings, **found))


def test_application_is_the_draft_s_deployment_alone() -> None:
    application = build_app(cluster.draft(NEXT), name="next")
    (deployment,) = application.deployments
    assert deployment.name == draft_deployment("next") == "draft-next"
    assert deployment.func_or_class is DraftWorker
    engine, trust, _, name = deployment.init_args
    assert (engine.cache_memory, trust.token, name) == (CACHE, "of the service in this test", "next")


def test_joins_names_one_of_the_drafts() -> None:
    for arguments in ({**NEXT, "joins": "other"}, {**SERVED}):
        with pytest.raises(SettingsError, match=r"joins=.* is no draft of these settings: one of model"):
            cluster.draft(arguments)


def test_joining_draft_without_the_services_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN)
    with pytest.raises(ValueError, match=r"^OUTRIDER_TOKEN is not set"):
        cluster.draft(NEXT)


def test_joining_draft_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"drafts\.next"):
        cluster.draft({**NEXT, "drafts.next.cache_memory": 2**50})
