"""The parts of a deployment agree with each other and with the code, and each check notices a slip."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.k8s.kustomize import Manifest
from tests.k8s.mutations import GONE, mutated
from tests.k8s.names import labels, mounts, ports, references, services
from tests.k8s.numbers import code, drains, requested_memory, resources, security, weights
from tests.k8s.overlays import K8S, built

Check = Callable[[list[Manifest]], list[str]]
CHECKS: list[Check] = [
    references,
    mounts,
    ports,
    labels,
    services,
    resources,
    drains,
    weights,
    security,
    code,
]
TARGET = "RayService/outrider/spec/rayClusterConfig/workerGroupSpecs/1"
HTTP = "target/spec/containers/0/ports/0"
SLIPS: list[tuple[Check, str, Any, str]] = [
    (references, "target/spec/volumes/0/configMap/name", "settings", "ConfigMap settings"),
    (references, "draft/spec/volumes/1/secret/secretName", "api-keys", "Secret api-keys"),
    (references, "head/spec/volumes/2/persistentVolumeClaim/claimName", "weights", "claim weights"),
    (
        references,
        "head/spec/initContainers/0/env/1/valueFrom/secretKeyRef/key",
        "HF_TOKEN",
        "HF_TOKEN of Secret",
    ),
    (references, "gateway/spec/priorityClassName", "high", "priority high"),
    (references, "Certificate/outrider-rounds/spec/secretName", "rounds", "Secret outrider-rounds"),
    (references, "Certificate/outrider-authority/spec/secretName", "authority", "outrider-authority"),
    (
        references,
        "RayService/outrider/spec/rayClusterConfig/authOptions/secretName",
        "ray",
        "authOptions names Secret ray",
    ),
    (mounts, "draft/spec/containers/0/volumeMounts/2/name", "models", "mounts models"),
    (mounts, "gateway/spec/containers/0/volumeMounts/1", GONE, "gateway has no mount for /etc/outrider/keys"),
    (mounts, "head/spec/containers/0/volumeMounts/4", GONE, "head has no mount for /etc/outrider/tls"),
    (mounts, "StatefulSet/outrider-redis/spec/volumeClaimTemplates/0/metadata/name", "disk", "mounts data"),
    (ports, f"{HTTP}/containerPort", 800000, "800000"),
    (ports, f"{HTTP}/name", "http", "opens None as serve"),
    (ports, "ConfigMap/outrider-settings/data/outrider.yaml", "addresses: {grpc_port: 9001}", "9001"),
    (ports, "Service/outrider-redis/spec/ports/0/targetPort", "redis-server", "port redis-server,"),
    (ports, "PodMonitor/outrider/spec/podMetricsEndpoints/0/port", "prometheus", "port prometheus,"),
    (ports, "NetworkPolicy/outrider/spec/ingress/1/ports/1/port", "grpc", "port grpc,"),
    (ports, "NetworkPolicy/outrider-tracing/spec/egress/0/ports/0/port", "grpc", "port grpc,"),
    (
        ports,
        "StatefulSet/outrider-redis/spec/template/spec/containers/0/livenessProbe/tcpSocket/port",
        "cache",
        "port cache",
    ),
    (labels, "PodDisruptionBudget/outrider-target/spec/selector/matchLabels/role", "targets", "targets"),
    (labels, "NetworkPolicy/outrider-redis/spec/ingress/0/from/0/podSelector/matchLabels/role", "h", "'h'"),
    (labels, "Service/outrider-collector/spec/selector/app", "collector", "collector"),
    (labels, "PodMonitor/outrider/spec/selector/matchLabels/app", "ray", "PodMonitor outrider"),
    (services, "Service/outrider-redis/metadata/name", "redis", "outrider-redis:6379 is no Service"),
    (services, "Service/outrider-collector/spec/ports/0/port", 4318, "outrider-collector:4317"),
    (services, "StatefulSet/outrider-redis/spec/serviceName", "redis", "names Service redis"),
    (
        resources,
        "target/spec/containers/0/resources/limits/nvidia.com~1gpu",
        "8",
        "target is 4 with 1.0 GPUs each, its pod has 8",
    ),
    (
        resources,
        "draft/spec/containers/0/resources/limits/nvidia.com~1gpu",
        GONE,
        "its pod has 0",
    ),
    (resources, f"{TARGET}/resources", {"target": "1"}, "group target gives"),
    (resources, f"{TARGET}/groupName", "targets", "no worker group target"),
    (resources, f"{TARGET}/replicas", 2, "2 pods"),
    (resources, f"{TARGET}/maxReplicas", 3, "up to 4 of target"),
    (drains, "gateway/spec/terminationGracePeriodSeconds", 30, "the grace of gateway 30 s"),
    (
        drains,
        "draft/spec/containers/0/lifecycle/preStop/exec/command/3",
        "--within=60",
        "the hook of draft 60 s",
    ),
    (drains, "RayService/outrider/spec/rayClusterDeletionDelaySeconds", 60, "the old cluster's 60 s"),
    (drains, "ConfigMap/outrider-settings/data/outrider.yaml", "gateway: {request_deadline_s: 9999}", "9999"),
    (
        weights,
        "head/spec/initContainers/0/args/2",
        "meta-llama/Llama-3.2-3B",
        "Llama-3.2-1B-Instruct is served",
    ),
    (weights, "head/spec/initContainers/0/args/0", "--into=/models", "/models"),
    (security, "RayService/outrider/spec/rayClusterConfig/authOptions/mode", "disabled", "for no token"),
    (security, "target/spec/securityContext/runAsUser", 0, "target may run as root"),
    (security, "outrider-collector/spec/securityContext/seccompProfile", GONE, "collector runs without"),
    (security, "draft/spec/automountServiceAccountToken", GONE, "draft has a token"),
    (security, "gateway/spec/containers/0/securityContext/capabilities", {}, "gateway keeps privileges"),
    (security, "head/spec/initContainers/0/securityContext/readOnlyRootFilesystem", False, "head can write"),
    (security, "draft/spec/containers/0/resources/limits", {}, "draft does not say"),
    (code, "target/spec/containers/0/env/7/value", "1", "target takes other message sizes"),
    (
        code,
        "target/spec/containers/0/env/3/value",
        "/home/ray/.triton",
        "target keeps TRITON_CACHE_DIR in /h",
    ),
    (code, "target/spec/initContainers/0/command/3", "/tmp", "target copies kernels to /tmp, where"),
    (code, "draft/spec/containers/0/env/3", GONE, "draft keeps TRITON_CACHE_DIR in None"),
    (code, "draft/spec/containers/0/env/0", GONE, "draft has no OUTRIDER_TOKEN"),
    (code, "Certificate/outrider-rounds/spec/dnsNames", ["outrider.svc"], "not for the name outrider"),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_overlay_is_in_agreement(check: Check, manifests: list[Manifest]) -> None:
    assert check(manifests) == []


@pytest.mark.parametrize(
    ("check", "place", "value", "told"), SLIPS, ids=lambda part: getattr(part, "__name__", None)
)
def test_agreement_check_finds_a_slip(check: Check, place: str, value: Any, told: str) -> None:
    assert any(told in sentence for sentence in check(mutated(built("gke"), place, value)))


def test_agreement_checks_notice_a_slip_each() -> None:
    assert {check for check, *_ in SLIPS} == set(CHECKS)


def test_guide_names_enough_memory_for_the_overlay_of_kind():
    """Beside the pods there are KubeRay's operator, with 0.5 GiB, and Kubernetes itself."""
    named = re.search(r"cpu: (\d+) GiB of memory for kind", (K8S / "README.md").read_text())
    assert named is not None
    assert requested_memory(built("cpu")) + 0.5 + 1.0 <= int(named[1])
