"""Manifests against the schemas of their kinds: no field misspelt, none of the wrong type."""

import json
import os
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import pytest

from tests.k8s.kustomize import Manifest, find
from tests.k8s.mutations import mutated
from tests.k8s.overlays import built
from tests.k8s.reading import pod_templates

KUBERNETES = "1.33"
SCHEMA = "KUBERAY_RAYSERVICE_SCHEMA"
OF_OTHERS = {"RayService", "PodMonitor", "PrometheusRule", "Certificate", "Issuer"}


def validate_core(manifests: list[Manifest]) -> int:
    """Kubernetes' own kinds, and pod templates as the pods they become; how many there were."""
    core = [m for m in manifests if m["kind"] not in OF_OTHERS]
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": name}}
        | {"spec": template["spec"]}
        for name, template in pod_templates(manifests).items()
    ]
    for manifest in core + pods:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    return len(core) + len(pods)


def validate_rayservice(manifests: list[Manifest]) -> None:
    path = os.environ.get(SCHEMA)
    if not path:
        pytest.skip(f"{SCHEMA} IS NOT SET: the RayService is held against no schema")
    schema = json.loads(Path(path).read_text())
    jsonschema.validate(find(manifests, "RayService", "outrider"), _closed(schema))


def _closed(schema: Any) -> Any:
    """A schema that allows only the fields it names, as the API server warns of others and drops them."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    named = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    return {"additionalProperties": False} | closed if named else closed


@pytest.mark.slow_beyond_first
def test_kinds_of_kubernetes_are_valid(manifests: list[Manifest]) -> None:
    assert validate_core(manifests) >= 15


def test_rayservice_is_valid(manifests: list[Manifest]) -> None:
    validate_rayservice(manifests)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("NetworkPolicy/outrider/spec/ingres", []),
        ("PodDisruptionBudget/outrider-target/spec/maxUnavailable", [1]),
        ("PersistentVolumeClaim/outrider-weights/spec/accessModes", "ReadWriteMany"),
        ("StatefulSet/outrider-redis/spec/template/spec/containers/0/ports/0/containerPort", "6379"),
        ("target/spec/containers/0/securityContext/readOnlyRootFileSystem", True),
        ("head/spec/initContainers/0/args", "--into=/weights"),
        ("gateway/spec/terminationGracePeriodSeconds", "600"),
    ],
)
def test_slip_in_a_kind_of_kubernetes_is_seen(place: str, value: Any) -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        validate_core(mutated(built("gke"), place, value))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("RayService/outrider/spec/serveConfigV3", ""),
        ("RayService/outrider/spec/rayClusterDeletionDelaySeconds", "600"),
        ("RayService/outrider/spec/rayClusterConfig/workerGroupSpecs/1/groupname", "target"),
        ("RayService/outrider/spec/rayClusterConfig/workerGroupSpecs/1/resources/target", 1),
        ("RayService/outrider/spec/rayClusterConfig/gcsFaultToleranceOptions/redisAdress", "redis"),
        ("draft/spec/containers/0/volumeMounts/0/readonly", True),
    ],
)
def test_slip_in_the_rayservice_is_seen(place: str, value: Any) -> None:
    slip = mutated(built("gke"), place, value)
    with pytest.raises(jsonschema.ValidationError):
        validate_rayservice(slip)
