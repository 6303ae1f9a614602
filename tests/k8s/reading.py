"""What a set of manifests holds, for the checks to compare."""

import re
from pathlib import Path
from typing import Any

import yaml

from cluster.arguments import together, validated
from cluster.settings import Settings
from outrider.demo.prompts import DEMO
from tests.k8s.kustomize import Manifest, find

SECRET = re.compile(r"create secret generic (?P<name>\S+)(?P<rest>(?:[^`\n]|\\\n)*)")
SECRET_KEY = re.compile(r"--from-(?:literal|file)=([\w-]+)=")


def pod_templates(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Pod templates by the name of their worker group, StatefulSet or Deployment; "head" is the head's."""
    cluster = find(manifests, "RayService", "outrider")["spec"]["rayClusterConfig"]
    templates = {"head": cluster["headGroupSpec"]["template"]}
    templates |= {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    for manifest in manifests:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            templates[manifest["metadata"]["name"]] = manifest["spec"]["template"]
    return templates


def ray_templates(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Returns the templates of the RayService."""
    return {
        name: template
        for name, template in pod_templates(manifests).items()
        if template["metadata"]["labels"].get("app") == "outrider"
    }


def containers(template: Manifest) -> list[Manifest]:
    spec = template["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def settings_of(manifests: list[Manifest]) -> Settings:
    """The settings that the files of the ConfigMap make, as ``config=<folder>`` reads them."""
    files = find(manifests, "ConfigMap", "outrider-settings")["data"]
    return validated(together((name, yaml.safe_load(text)) for name, text in files.items()))


def checkpoints_of(settings: Settings) -> dict[str, str]:
    """Roles by the models that are served, but for the demo pair, which the image has."""
    roles = {settings.target.model: "target"}
    roles |= {draft.model: "draft" for draft in settings.drafts.values()}
    return {model: role for model, role in roles.items() if not Path(model).is_relative_to(DEMO)}


def serve_config_of(manifests: list[Manifest]) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(
        find(manifests, "RayService", "outrider")["spec"]["serveConfigV2"]
    )
    return config


def secrets_of_guide(guide: Path) -> dict[str, set[str]]:
    """Secrets that the guide's commands make, and their keys."""
    return {
        found["name"]: set(SECRET_KEY.findall(found["rest"])) for found in SECRET.finditer(guide.read_text())
    }
