"""What a worker is told about its device, and what is said of drafts without one."""

import logging
from typing import Any

import pytest
import ray
from ray.serve._private.build_app import build_app

import cluster
from cluster.preflight import Preflight, find
from outrider.engine.settings import EngineSettings
from tests.support.served import SERVED

ON_GPUS = {**SERVED, "target.accelerator": "H100"}


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of one node with four, on which nothing starts."""
    there = {"GPU": 4.0, "accelerator_type:H100": 1.0}
    monkeypatch.setattr("cluster.application.start_ray", lambda settings: None)
    monkeypatch.setattr("cluster.application.start_serve", lambda settings, key: None)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": there}])
    monkeypatch.setattr(ray, "cluster_resources", lambda: there)
    monkeypatch.setattr("cluster.start.ask_nodes", lambda settings: {})
    # In this process, which has torch already.
    monkeypatch.setattr(Preflight, "find", lambda _, settings, **found: find(settings, **found))


def engines(arguments: dict[str, Any]) -> dict[str, EngineSettings]:
    """Settings of each worker's engine by the name of its deployment."""
    found = build_app(cluster.app(arguments), name="default").deployments
    return {
        deployment.name: deployment.init_args[0]
        for deployment in found
        if isinstance(deployment.init_args[0], EngineSettings)
    }


@pytest.mark.parametrize(
    ("arguments", "target", "draft"),
    [
        ({**ON_GPUS, "drafts.model.accelerator": "H100"}, "cuda", "cuda"),
        ({**ON_GPUS, "target.tensor_parallel": 2, "drafts.model.gpus": 0}, "cuda", "cpu"),
        ({**SERVED, "target.gpus": 0, "drafts.model.gpus": 0}, "cpu", "cpu"),
    ],
    ids=str,
)
def test_engine_of_a_worker_without_gpus_is_on_the_cpu(
    arguments: dict[str, Any], target: str, draft: str
) -> None:
    found = {name: engine.device for name, engine in engines(arguments).items()}
    assert found == {"target": target, "draft-model": draft}


def test_draft_on_a_cpu_beside_gpus_is_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ray.serve"):
        engines({**ON_GPUS, "drafts.model.gpus": 0})
    assert "drafts.model.gpus=0 puts the draft on a CPU" in caplog.text


def test_draft_on_a_cpu_beside_a_cpu_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ray.serve"):
        engines({**SERVED, "target.gpus": 0, "drafts.model.gpus": 0})
    assert "puts the draft on a CPU" not in caplog.text
