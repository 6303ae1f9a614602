"""Serve applications that are built without a cluster."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import ray
from ray.serve import Application, Deployment
from ray.serve._private.build_app import build_app

from cluster.preflight import Found


def pretend_cluster(monkeypatch: pytest.MonkeyPatch, **resources: float) -> list[str]:
    """Lets applications be built as on one node with these resources; returns a list of started systems."""
    started: list[str] = []
    for step in ("start_ray", "start_serve"):
        monkeypatch.setattr(f"cluster.application.{step}", lambda *_, step=step: started.append(step))
    preflight = SimpleNamespace(find=lambda settings, **_: Found(settings))
    monkeypatch.setattr("cluster.application.Preflight", lambda: nullcontext(preflight))
    monkeypatch.setattr("cluster.start.ask_nodes", lambda settings: {})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": resources}])
    monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
    return started


def deployments(application: Application) -> dict[str, Deployment]:
    """Returns the deployments of an application by name."""
    built = build_app(application, name="app", make_deployment_handle=lambda deployment, app: deployment.name)
    return {deployment.name: deployment for deployment in built.deployments}
