"""The manifests of every overlay, read once."""

import functools
import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve's own use of pydantic is deprecated
    import ray.serve  # noqa: F401

from tests.k8s.kustomize import Manifest, build

K8S = Path(__file__).parents[2] / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return request.param


@functools.cache
def built(overlay: str) -> list[Manifest]:
    """To be read only: it is built once."""
    return build(K8S / "overlays" / overlay)


@pytest.fixture
def manifests(overlay: str) -> list[Manifest]:
    return built(overlay)
