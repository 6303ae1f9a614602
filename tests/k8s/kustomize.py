"""Reads Kustomize folders in Python, for machines without kubectl. What it does not know it refuses.

Names keep no hash: here they stay as they are written.
"""

import json
from pathlib import Path
from typing import Any, TypeAlias

import jsonpatch
import yaml

Manifest: TypeAlias = dict[str, Any]
KNOWN = {
    "apiVersion",
    "kind",
    "namespace",
    "resources",
    "components",
    "configurations",
    "configMapGenerator",
    "replacements",
    "images",
    "patches",
}
CLUSTER_WIDE = {"Namespace", "PriorityClass"}
LOCAL = "config.kubernetes.io/local-config"


def build(folder: Path) -> list[Manifest]:
    """What ``kubectl kustomize`` prints, but for the hashes."""
    manifests: list[Manifest] = []
    _read(folder, manifests)
    return [m for m in manifests if LOCAL not in m["metadata"].get("annotations", {})]


def _read(folder: Path, manifests: list[Manifest]) -> None:
    """Adds the folder's manifests to those there, and changes these as it says."""
    file = folder / "kustomization.yaml"
    rules = yaml.safe_load(file.read_text())
    assert rules.keys() <= KNOWN, f"{file}: this reader does not know {sorted(rules.keys() - KNOWN)}"
    for name in rules.get("resources", []) + rules.get("components", []):
        path = folder / name
        if path.is_dir():
            _read(path, manifests)
        else:
            # Through JSON, so that what an anchor names several times is several things.
            manifests += json.loads(json.dumps(list(yaml.safe_load_all(path.read_text()))))
    for generator in rules.get("configMapGenerator", []):
        _generate(folder, generator, manifests)
    for manifest in manifests:
        if "namespace" in rules and manifest["kind"] not in CLUSTER_WIDE:
            manifest["metadata"]["namespace"] = rules["namespace"]
    for patch in rules.get("patches", []):
        operations = json.dumps(yaml.safe_load((folder / patch["path"]).read_text()))
        chosen = find(manifests, patch["target"]["kind"], patch["target"]["name"])
        chosen.update(jsonpatch.apply_patch(chosen, operations))
    for image in rules.get("images", []):
        _rename_image(manifests, image["name"], f"{image['newName']}:{image['newTag']}")
    for replacement in rules.get("replacements", []):
        _replace(replacement, manifests)


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """Raises LookupError if it is not there exactly once."""
    found = [m for m in manifests if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    if len(found) != 1:
        raise LookupError(f"{len(found)} of {kind} {name}")
    return found[0]


def _generate(folder: Path, generator: Manifest, manifests: list[Manifest]) -> None:
    data = {Path(name).name: (folder / name).read_text() for name in generator["files"]}
    behavior = generator.get("behavior", "create")
    if behavior == "create":
        extra = {k: v for k, v in generator.get("options", {}).items() if k in ("annotations", "labels")}
        metadata = {"name": generator["name"], **extra}
        if "namespace" in generator:
            metadata["namespace"] = generator["namespace"]
        manifests.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    else:
        there = find(manifests, "ConfigMap", generator["name"])
        there["data"] = data if behavior == "replace" else there["data"] | data


def _rename_image(node: Any, name: str, new: str) -> None:
    for child in node.values() if isinstance(node, dict) else node:
        if isinstance(child, dict | list):
            _rename_image(child, name, new)
    if isinstance(node, dict) and node.get("image") == name:
        node["image"] = new


def _replace(replacement: Manifest, manifests: list[Manifest]) -> None:
    """The one form in use: a file of a ConfigMap becomes a field of the spec."""
    source = replacement["source"]
    text = find(manifests, source["kind"], source["name"])["data"][source["fieldPath"][len("data.[") : -1]]
    for target in replacement["targets"]:
        for manifest in manifests:
            if manifest["kind"] == target["select"]["kind"]:
                for path in target["fieldPaths"]:
                    manifest["spec"][path.removeprefix("spec.")] = text
