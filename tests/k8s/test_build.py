"""Every overlay builds, with kubectl and with the reader of these tests alike, and a slip fails the build."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
import yaml

from tests.k8s.kustomize import Manifest, build
from tests.k8s.overlays import K8S
from tests.support.patience import LIMIT_S

HASH = re.compile(r"^(outrider-(?:settings|collector))-[0-9a-z]{10}$")


def kubectl(folder: Path) -> str:
    if shutil.which("kubectl") is None:
        pytest.skip("NO kubectl HERE: what Kustomize itself builds is not compared")
    return subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True, timeout=LIMIT_S
    ).stdout


def without_hashes(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: without_hashes(value) for key, value in node.items()}
    if isinstance(node, list):
        return [without_hashes(value) for value in node]
    return HASH.sub(r"\1", node) if isinstance(node, str) else node


def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    return {(m["kind"], m["metadata"]["name"]): m for m in manifests}


def test_kubectl_builds_what_the_tests_read(overlay: str, manifests: list[Manifest]) -> None:
    built = list(yaml.safe_load_all(kubectl(K8S / "overlays" / overlay)))
    assert by_name(without_hashes(built)) == by_name(manifests)


def test_settings_have_a_hash_where_they_are_mounted(overlay: str) -> None:
    built = yaml.safe_load_all(kubectl(K8S / "overlays" / overlay))
    names = {m["metadata"]["name"] for m in built if m["kind"] == "ConfigMap"}
    (settings,) = (name for name in names if name.startswith("outrider-settings-"))
    text = kubectl(K8S / "overlays" / overlay)
    assert text.count(f"name: {settings}") == 1 + 4  # itself, the head and three worker groups


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(K8S, tmp_path / "k8s"))


@pytest.mark.parametrize("patch", ["accelerators.yaml", "../../components/mutual-tls/mounts.yaml"])
def test_patch_for_another_worker_group_fails_the_build(patch: str, copied: Path) -> None:
    file = copied / "overlays" / "gke" / patch
    file.write_text(file.read_text().replace("value: draft", "value: drafts"))
    with pytest.raises(jsonpatch.JsonPatchTestFailed, match="drafts"):
        build(copied / "overlays" / "gke")
    with pytest.raises(subprocess.CalledProcessError):
        kubectl(copied / "overlays" / "gke")


def patch_files() -> list[Path]:
    found = []
    for file in K8S.rglob("kustomization.yaml"):
        rules = yaml.safe_load(file.read_text())
        found += [file.parent / patch["path"] for patch in rules.get("patches", [])]
    return found


@pytest.mark.parametrize("file", patch_files(), ids=lambda file: str(file.relative_to(K8S)))
def test_patches_of_worker_groups_are_guarded(file: Path) -> None:
    guarded = set()
    for operation in yaml.safe_load(file.read_text()):
        if found := re.match(r".*/workerGroupSpecs/(\d+)/(.*)", operation["path"]):
            index, field = found.groups()
            if (operation["op"], field) == ("test", "groupName"):
                guarded.add(index)
            assert index in guarded, f"{operation['path']} before a test of its groupName"


def test_reader_refuses_unknown_fields(copied: Path) -> None:
    file = copied / "base" / "kustomization.yaml"
    file.write_text(file.read_text() + "namePrefix: x-\n")
    with pytest.raises(AssertionError, match="namePrefix"):
        build(copied / "base")
