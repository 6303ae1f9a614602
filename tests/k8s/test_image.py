"""The image is what the manifests take for granted; it is not built here."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from setuptools import find_packages  # type: ignore[import-untyped]

from tests.k8s.kustomize import find
from tests.k8s.overlays import K8S, built
from tests.k8s.reading import ray_templates

ROOT = K8S.parent
RAYS_USER = 1000


def versions(dockerfile: str) -> list[str]:
    """One version of Ray: of the image, of what pip keeps, of the RayService, of these tests."""
    told = {
        "FROM": re.search(r"^FROM rayproject/ray:([\d.]+)-py311$", dockerfile, re.MULTILINE),
        "pip": re.search(r"'ray\[serve-grpc\]==([\d.]+)'", dockerfile),
    }
    found = {where: match and match[1] for where, match in told.items()}
    found["rayVersion"] = find(built("gke"), "RayService", "outrider")["spec"]["rayClusterConfig"][
        "rayVersion"
    ]
    return [f"{where} is {version}" for where, version in found.items() if version != ray.__version__]


def packages(dockerfile: str) -> list[str]:
    """Everything that pip installs is copied, and nothing of it kept back."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = find_packages(ROOT, include=project["tool"]["setuptools"]["packages"]["find"]["include"])
    needed = {name.partition(".")[0] for name in found}
    kept_back = needed & set((ROOT / ".dockerignore").read_text().splitlines())
    return sorted(kept_back if "COPY --chown=ray:users . .\n" in dockerfile else needed)


def test_image_installs_six_top_level_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = find_packages(ROOT, include=project["tool"]["setuptools"]["packages"]["find"]["include"])
    assert {name.partition(".")[0] for name in found} == {
        "outrider",
        "actors",
        "cluster",
        "gateway",
        "protos",
        "workshop",
    }


def torch(dockerfile: str) -> list[str]:
    """The torch that is installed first is the one that the package asks for."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["server"]
    (wanted,) = (line for line in asked if line.startswith("torch"))
    return [] if f"'{wanted}'" in dockerfile else [wanted]


def user(dockerfile: str) -> list[str]:
    """It ends as the user that the pods run as, which is not root."""
    *_, last = re.findall(r"^USER (\S+)$", dockerfile, re.MULTILINE) or [""]
    pods = {t["spec"]["securityContext"]["runAsUser"] for t in ray_templates(built("gke")).values()}
    return [] if {last} == {str(uid) for uid in pods} == {str(RAYS_USER)} else [f"USER {last}, pods {pods}"]


def kernels(dockerfile: str) -> list[str]:
    """The folder from which workers with a GPU copy kernels is in the image."""
    wrong = []
    for where, template in ray_templates(built("gke")).items():
        copies = [c for c in template["spec"].get("initContainers", []) if c["name"] == "kernels"]
        if [c["command"][2].removesuffix("/.") for c in copies] != ["/home/ray/kernels"] * (
            where in ("target", "draft")
        ):
            wrong.append(f"{where} copies kernels by {copies}")
    made = "RUN mkdir -p kernels && cp -r kernels /home/ray/kernels\n"
    return wrong if made in dockerfile else [*wrong, "the image has no folder /home/ray/kernels"]


Check = Callable[[str], list[str]]
CHECKS: list[Check] = [versions, packages, torch, user, kernels]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_image_is_what_the_manifests_need(check: Check) -> None:
    assert check((ROOT / "Dockerfile").read_text()) == []


@pytest.mark.parametrize(
    ("check", "old", "new"),
    [
        (versions, "ray:2.60.0-py311", "ray:2.59.0-py311"),
        (versions, "==2.60.0", "==2.61.0"),
        (packages, "COPY --chown=ray:users . .\n", "COPY --chown=ray:users gateway gateway\n"),
        (torch, "torch>=2.13", "torch>=2.12"),
        (user, "USER 1000", "USER root"),
        (user, "USER 1000\n", ""),
        (kernels, "cp -r kernels /home/ray/kernels", "cp -r kernels /home/ray/kernel"),
    ],
)
def test_slip_in_the_image_is_noticed(check: Check, old: str, new: str) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert old in dockerfile
    assert check(dockerfile.replace(old, new))


def test_commands_of_the_manifests_are_modules_of_the_package() -> None:
    text = Path(K8S / "base" / "rayservice.yaml").read_text()
    modules = re.findall(r'"python", "-m", "([\w.]+)"', text)
    assert modules
    assert all((ROOT / f"{module.replace('.', '/')}.py").exists() for module in modules)
