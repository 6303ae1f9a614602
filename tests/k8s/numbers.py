"""Numbers and rules that manifests, settings and code share: each check says what does not agree."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from actors.worker import STOP_GRACE_S
from cluster.groups import GatewayReplicas, WorkerSettings
from protos.trust import NAME
from tests.k8s.kustomize import Manifest, find
from tests.k8s.reading import (
    checkpoints_of,
    containers,
    pod_templates,
    ray_templates,
    serve_config_of,
    settings_of,
)

# Environment variables that name what is written at run time.
CACHES = ("HF_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")


def resources(manifests: list[Manifest]) -> list[str]:
    """Each kind of replica has a worker group with its resource and its devices, one replica to a pod."""
    wrong = []
    settings = settings_of(manifests)
    groups = find(manifests, "RayService", "outrider")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    by_name = {group["groupName"]: group for group in groups}
    gateway, target = settings.gateway, settings.target
    (draft,) = settings.drafts.values()
    wanted: dict[str, tuple[GatewayReplicas | WorkerSettings, int, int | None, float | None]] = {
        "gateway": (gateway, 1, None, 0.0),
        "target": (target, target.tensor_parallel, target.max_replicas, target.gpus),
        "draft": (draft, 1, draft.max_replicas, draft.gpus),
    }
    for name, (of_kind, ranks, most, gpus_of_rank) in wanted.items():
        replicas = of_kind.replicas
        if name not in by_name:
            wrong.append(f"no worker group {name}")
            continue
        group = by_name[name]
        given = {key: float(value) for key, value in group["resources"].items()}
        asked = {key: ranks * value for key, value in of_kind.resources.items()}
        if given.keys() != {name} or asked != given:
            wrong.append(f"a {name} asks for {asked}, a pod of group {name} gives {given}")
        gpus = float(
            group["template"]["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", 0)
        )
        if gpus != ranks * (gpus_of_rank or 0.0):
            wrong.append(f"a {name} is {ranks} with {gpus_of_rank} GPUs each, its pod has {gpus:g}")
        if not replicas == group["replicas"] == group["minReplicas"] <= group["maxReplicas"]:
            wrong.append(f"{replicas} of {name} in the settings, {group['replicas']} pods to begin with")
        if (most or 0) > group["maxReplicas"]:
            wrong.append(f"up to {most} of {name} in the settings, {group['maxReplicas']} pods at most")
    return wrong


def drains(manifests: list[Manifest]) -> list[str]:
    """Each waits at least as long as what it waits for."""
    spec = find(manifests, "RayService", "outrider")["spec"]
    serve = serve_config_of(manifests)
    (gateway,) = (d for d in serve["applications"][0]["deployments"] if d["name"] == "gateway")
    deadline = settings_of(manifests).gateway.request_deadline_s
    chain = [("a request's deadline", deadline), ("the gateway's", gateway["graceful_shutdown_timeout_s"])]
    wrong = []
    for where, template in ray_templates(manifests).items():
        if where != "head":
            hook = template["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
            within = float(hook[-1].removeprefix("--within="))
            grace = template["spec"]["terminationGracePeriodSeconds"]
            wrong += _nested([*chain, (f"the hook of {where}", within), (f"the grace of {where}", grace)])
    wrong += _nested([*chain, ("the old cluster's", spec["rayClusterDeletionDelaySeconds"])])
    wrong += _nested(
        [("a worker's streams", STOP_GRACE_S), ("the gateway's", gateway["graceful_shutdown_timeout_s"])]
    )
    for proxy in ("http_options", "grpc_options"):
        wrong += _nested([("a request's deadline", deadline), (proxy, serve[proxy]["request_timeout_s"])])
    return sorted(set(wrong))


def _nested(chain: list[tuple[str, float]]) -> list[str]:
    return [
        f"{outer} {longer:g} s end before {inner} {shorter:g} s"
        for (inner, shorter), (outer, longer) in pairwise(chain)
        if longer < shorter
    ]


def weights(manifests: list[Manifest]) -> list[str]:
    """Checkpoints that the settings name in the volume are those that the init container puts there."""
    (head,) = (t for name, t in pod_templates(manifests).items() if name == "head")
    fetched = set()
    for container in head["spec"].get("initContainers", []):
        into, *sources = container["args"]
        fetched |= {f"{into.removeprefix('--into=')}/{source}" for source in sources}
    named = {*checkpoints_of(settings_of(manifests))}
    return [f"{path} is got and not served" for path in fetched - named] + [
        f"{path} is served and not got" for path in named - fetched
    ]


def security(manifests: list[Manifest]) -> list[str]:
    """What the namespace's standard "restricted" asks for, a read-only root, and memory that is bounded."""
    wrong = []
    cluster = find(manifests, "RayService", "outrider")["spec"]["rayClusterConfig"]
    if cluster["authOptions"]["mode"] != "token":
        wrong.append("Ray's own ports ask for no token")
    for where, template in pod_templates(manifests).items():
        pod = template["spec"].get("securityContext", {})
        if not pod.get("runAsNonRoot") or pod.get("runAsUser", 0) == 0:
            wrong.append(f"{where} may run as root")
        if pod.get("seccompProfile") != {"type": "RuntimeDefault"}:
            wrong.append(f"{where} runs without a seccomp profile")
        if where != "head" and template["spec"].get("automountServiceAccountToken") is not False:
            wrong.append(f"{where} has a token of the API server that it does not need")
        for container in containers(template):
            own = container.get("securityContext", {})
            if own.get("allowPrivilegeEscalation") is not False or own.get("capabilities") != {
                "drop": ["ALL"]
            }:
                wrong.append(f"{where} keeps privileges")
            if not own.get("readOnlyRootFilesystem"):
                wrong.append(f"{where} can write its root")
            asked, limit = container["resources"]["requests"], container["resources"]["limits"]
            if not {"cpu", "memory"} <= asked.keys() or "memory" not in limit:
                wrong.append(f"{where} does not say what it needs")
    return wrong


def _caches(where: str, pod: Manifest, variables: Mapping[str, Any]) -> list[str]:
    """What is kept at run time lies in volumes that can be written to, as the root and the home cannot."""
    empty = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
    mounts = pod["containers"][0]["volumeMounts"]
    folders = [Path(mount["mountPath"]) for mount in mounts if mount["name"] in empty]
    return [
        f"{where} keeps {name} in {variables.get(name)}, which is read-only"
        for name in CACHES
        if not any(Path(variables.get(name) or "/").is_relative_to(folder) for folder in folders)
    ]


def _copied_kernels(where: str, pod: Manifest, variables: Mapping[str, Any]) -> list[str]:
    """Kernels of the image are copied to where Triton looks for them."""
    copies = [container for container in pod.get("initContainers", []) if container["name"] == "kernels"]
    return [
        f"{where} copies kernels to {container['command'][-1]}, where Triton does not look"
        for container in copies
        if container["command"][-1] != variables.get("TRITON_CACHE_DIR")
    ]


def requested_memory(manifests: list[Manifest]) -> float:
    """GiB that the pods of an overlay ask for, with one cluster of Ray and its autoscaler."""
    spec = find(manifests, "RayService", "outrider")["spec"]["rayClusterConfig"]
    replicas = {group["groupName"]: group["replicas"] for group in spec["workerGroupSpecs"]}
    return _gib(spec["autoscalerOptions"]) + sum(
        replicas.get(name, 1) * sum(_gib(container) for container in template["spec"]["containers"])
        for name, template in pod_templates(manifests).items()
    )


def _gib(container: Manifest) -> float:
    requests = container.get("resources", {}).get("requests", {})
    number, unit = requests.get("memory", "0Gi")[:-2], requests.get("memory", "0Gi")[-2:]
    return float(number) * {"Gi": 1.0, "Mi": 2.0**-10}[unit]


def code(manifests: list[Manifest]) -> list[str]:
    """Names and numbers that the code fixes."""
    wrong = []
    most_bytes = settings_of(manifests).gateway.max_message_bytes
    for where, template in ray_templates(manifests).items():
        variables = {v["name"]: v.get("value") for v in template["spec"]["containers"][0]["env"]}
        if variables.get("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE") != str(most_bytes):
            wrong.append(f"{where} takes other message sizes than {most_bytes}")
        wrong += _caches(where, template["spec"], variables)
        wrong += _copied_kernels(where, template["spec"], variables)
        if "OUTRIDER_TOKEN" not in variables:
            wrong.append(f"{where} has no OUTRIDER_TOKEN")
    for certificate in (m for m in manifests if m["kind"] == "Certificate"):
        if not certificate["spec"].get("isCA") and NAME not in certificate["spec"]["dnsNames"]:
            wrong.append(f"{certificate['metadata']['name']} is not for the name {NAME}")
    return wrong
