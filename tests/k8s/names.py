"""What manifests call by name exists: each check says what does not, and nothing where all is well."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.k8s.kustomize import Manifest, find
from tests.k8s.reading import (
    checkpoints_of,
    containers,
    pod_templates,
    ray_templates,
    secrets_of_guide,
    serve_config_of,
    settings_of,
)

GUIDE = Path(__file__).parents[2] / "k8s" / "README.md"
MADE_BY_KUBERAY = {"ray.io/is-ray-node", "ray.io/cluster", "ray.io/group"}
LABELS_OF_OTHERS = {"app.kubernetes.io/name"}  # labels of the operator's and Prometheus' pods
PROBES = ("readinessProbe", "livenessProbe", "startupProbe")


def references(manifests: list[Manifest]) -> list[str]:
    """Every ConfigMap, Secret with its key, claim and priority class that is named exists."""
    there: dict[str, dict[str, set[str] | None]] = {
        "ConfigMap": {},
        "Secret": {},
        "claim": {},
        "priority": {},
    }
    there["Secret"] |= secrets_of_guide(GUIDE)
    there["priority"] = dict.fromkeys(("system-cluster-critical", "system-node-critical"))
    for manifest in manifests:
        name = manifest["metadata"]["name"]
        match manifest["kind"]:
            case "ConfigMap":
                there["ConfigMap"][name] = set(manifest["data"])
            case "Certificate":
                there["Secret"][manifest["spec"]["secretName"]] = {"tls.crt", "tls.key", "ca.crt"}
            case "PersistentVolumeClaim":
                there["claim"][name] = None
            case "StatefulSet":
                there["claim"] |= {
                    c["metadata"]["name"]: None for c in manifest["spec"]["volumeClaimTemplates"]
                }
            case "PriorityClass":
                there["priority"][name] = None
    wrong = []
    for where, kind, name, key in _named(manifests):
        if name not in there[kind]:
            wrong.append(f"{where} names {kind} {name}, which nothing makes")
        elif key is not None and key not in (there[kind][name] or ()):
            wrong.append(f"{where} names {key} of {kind} {name}, which has no such key")
    return wrong


def _named(manifests: list[Manifest]) -> Iterator[tuple[str, str, str, str | None]]:
    """Where, kind, name, key."""
    cluster = find(manifests, "RayService", "outrider")["spec"]["rayClusterConfig"]
    password = cluster["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]["secretKeyRef"]
    yield "gcsFaultToleranceOptions", "Secret", password["name"], password["key"]
    yield "authOptions", "Secret", cluster["authOptions"]["secretName"], "auth_token"
    for issuer in (m for m in manifests if m["kind"] == "Issuer" and "ca" in m["spec"]):
        yield issuer["metadata"]["name"], "Secret", issuer["spec"]["ca"]["secretName"], None
    for where, template in pod_templates(manifests).items():
        spec = template["spec"]
        if "priorityClassName" in spec:
            yield where, "priority", spec["priorityClassName"], None
        for volume in spec.get("volumes", []):
            if "configMap" in volume:
                yield where, "ConfigMap", volume["configMap"]["name"], None
            elif "secret" in volume:
                yield where, "Secret", volume["secret"]["secretName"], None
            elif "persistentVolumeClaim" in volume:
                yield where, "claim", volume["persistentVolumeClaim"]["claimName"], None
        for container in containers(template):
            for variable in container.get("env", []):
                if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                    yield where, "Secret", reference["name"], reference["key"]


def mounts(manifests: list[Manifest]) -> list[str]:
    """A mount has its volume, and what the settings name lies below a mount of every pod that may read it.

    Serve builds the application on any node of the cluster.
    """
    wrong = []
    claimed = {
        m["metadata"]["name"]: {c["metadata"]["name"] for c in m["spec"]["volumeClaimTemplates"]}
        for m in manifests
        if m["kind"] == "StatefulSet"
    }
    for where, template in pod_templates(manifests).items():
        volumes = {volume["name"] for volume in template["spec"].get("volumes", [])} | claimed.get(
            where, set()
        )
        for container in containers(template):
            for mount in container.get("volumeMounts", []):
                if mount["name"] not in volumes:
                    wrong.append(f"{where} mounts {mount['name']}, which is no volume of it")
    settings = settings_of(manifests)
    (application,) = serve_config_of(manifests)["applications"]
    files = [application["args"]["config"], settings.access.api_keys_file, settings.access.tenants_file]
    files += [*checkpoints_of(settings), *settings.tls.model_dump().values()]
    for where, template in ray_templates(manifests).items():
        paths = [mount["mountPath"] for mount in template["spec"]["containers"][0]["volumeMounts"]]
        for file in filter(None, files):
            if not any(Path(file).is_relative_to(path) for path in paths):
                wrong.append(f"{where} has no mount for {file}")
    return wrong


def ports(manifests: list[Manifest]) -> list[str]:
    """Public ports are the same in settings, Serve's configuration and pods; a port's name exists."""
    wrong = []
    settings, serve = settings_of(manifests), serve_config_of(manifests)
    expected = {"serve": settings.addresses.http_port, "serve-grpc": settings.addresses.grpc_port}
    told = {"serve": serve["http_options"]["port"], "serve-grpc": serve["grpc_options"]["port"]}
    if told != expected:
        wrong.append(f"Serve's configuration says {told}, the settings {expected}")
    for where, template in ray_templates(manifests).items():
        opened = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
        wrong += [
            f"{where} opens {opened.get(n)} as {n} for {p}" for n, p in expected.items() if opened.get(n) != p
        ]
    names = {
        where: {port["name"] for container in containers(template) for port in container.get("ports", [])}
        for where, template in pod_templates(manifests).items()
    }
    for where, selector, port in _named_ports(manifests):
        chosen = [pod for pod, t in pod_templates(manifests).items() if _matches(selector, t)]
        if not any(port in names[pod] for pod in chosen):
            wrong.append(f"{where} names port {port}, which none of {chosen} has")
    return wrong


def _named_ports(manifests: list[Manifest]) -> Iterator[tuple[str, dict[str, str], str]]:
    """Where, labels of the pods that are to have it, its name."""
    for manifest in manifests:
        where, spec = f"{manifest['kind']} {manifest['metadata']['name']}", manifest.get("spec", {})
        if manifest["kind"] == "Service":
            yield from ((where, spec["selector"], port["targetPort"]) for port in spec["ports"])
        elif manifest["kind"] == "PodMonitor":
            labels = spec["selector"]["matchLabels"]
            yield from ((where, labels, endpoint["port"]) for endpoint in spec["podMetricsEndpoints"])
        elif manifest["kind"] == "NetworkPolicy":
            for rule in spec.get("ingress", []):
                for port in rule.get("ports", []):
                    yield where, spec["podSelector"]["matchLabels"], port["port"]
            for rule in spec.get("egress", []):
                for peer in rule.get("to", []):
                    for port in rule.get("ports", []):
                        yield where, peer["podSelector"]["matchLabels"], port["port"]
    for where, template in pod_templates(manifests).items():
        for container in containers(template):
            for probe in (container[name] for name in PROBES if name in container):
                for how in ("httpGet", "tcpSocket"):
                    if how in probe:
                        yield f"a probe of {where}", template["metadata"]["labels"], probe[how]["port"]


def _matches(selector: dict[str, str], template: Manifest) -> bool:
    own = {key: value for key, value in selector.items() if key not in MADE_BY_KUBERAY}
    return own.items() <= template["metadata"]["labels"].items()


def labels(manifests: list[Manifest]) -> list[str]:
    """Whatever selects our pods by labels finds some."""
    wrong = []
    templates = pod_templates(manifests).values()
    for manifest in manifests:
        for selector in _selectors(manifest):
            if LABELS_OF_OTHERS & selector.keys():
                continue
            if not any(_matches(selector, template) for template in templates):
                wrong.append(
                    f"{manifest['kind']} {manifest['metadata']['name']} selects {selector}: no pod has it"
                )
    return wrong


def _selectors(node: Any, key: str = "") -> Iterator[dict[str, str]]:
    """Label selectors of pods, anywhere in a manifest."""
    if isinstance(node, list):
        for child in node:
            yield from _selectors(child, key)
    elif isinstance(node, dict):
        if key == "selector" and "matchLabels" not in node:
            yield node
        for name, child in node.items():
            if name == "matchLabels" and key != "namespaceSelector":
                yield child
            else:
                yield from _selectors(child, name)


def services(manifests: list[Manifest]) -> list[str]:
    """Addresses of the form outrider-*:port are those of a Service and its port."""
    there = {
        (m["metadata"]["name"], port["port"])
        for m in manifests
        if m["kind"] == "Service"
        for port in m["spec"]["ports"]
    }
    named = re.findall(r"(outrider-[\w-]+):(\d+)", yaml.safe_dump(find(manifests, "RayService", "outrider")))
    wrong = [f"{name}:{port} is no Service" for name, port in set(named) if (name, int(port)) not in there]
    headless = {m["metadata"]["name"] for m in manifests if m["kind"] == "Service"}
    wrong += [
        f"StatefulSet {m['metadata']['name']} names Service {m['spec']['serviceName']}, which nothing makes"
        for m in manifests
        if m["kind"] == "StatefulSet" and m["spec"]["serviceName"] not in headless
    ]
    return wrong
