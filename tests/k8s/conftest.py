"""The manifests of every overlay, read once."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve's own use of pydantic is deprecated
    import ray.serve  # noqa: F401

from tests.k8s.kustomize import Manifest
from tests.k8s.overlays import K8S, built

OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def manifests(overlay: str) -> list[Manifest]:
    return built(overlay)
