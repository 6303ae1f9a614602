"""The manifests of this repository."""

import functools
from pathlib import Path

from tests.k8s.kustomize import Manifest, build

K8S = Path(__file__).parents[2] / "k8s"


@functools.cache
def built(overlay: str) -> list[Manifest]:
    """Returns an overlay, built once: read it only."""
    return build(K8S / "overlays" / overlay)
