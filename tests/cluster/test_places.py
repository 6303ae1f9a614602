"""Which devices the processes of a deployment see and take, on clusters whose nodes declare their GPUs.

Frontend, engine and ranks are real, as is Ray. torch is shown the GPUs that a node declares by
tests/support/declared_gpus, and models run on the CPU. ``-s`` prints the table.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import declared_gpus
from tests.support.machines import raylets
from tests.support.patience import LIMIT_S, START_S, wait_until
from tests.support.running import Service, serving
from tests.support.served import SERVED

pytestmark = pytest.mark.slow
PROGRAM = Path(next(iter(declared_gpus.__path__)))  # its sitecustomize is imported by every process
GB = 10**9


@dataclass(frozen=True)
class Node:
    name: str
    gpus: str  # accelerator types
    visible: str | None = None  # CUDA_VISIBLE_DEVICES of the node

    @property
    def types(self) -> list[str]:
        return self.gpus.split(",")

    @property
    def count(self) -> int:
        return len(self.types) if self.visible is None else len(self.visible.split(","))


@dataclass(frozen=True)
class Deployment:
    """What is deployed on which nodes, and what every process of an engine is expected to say."""

    nodes: tuple[Node, ...]
    settings: Mapping[str, Any]
    target: tuple[tuple[str, ...], ...]  # per replica: types of the GPU that each rank takes
    draft: tuple[str, ...]  # type of the GPU of each replica
    parts: tuple[float, float] = (1.0, 1.0)  # shares of a device's memory: target's, draft's
    environment: Mapping[str, str] = field(default_factory=dict)
    nodes_of_a_target: int = 1
    is_shared: bool = False  # target and draft share a GPU


CPU = "cpu"
FOUR = Node("a", "H100,H100,H100,H100")
L4 = Node("b", "L4")
BY_TYPE = {"target.accelerator": "H100", "drafts.model.accelerator": "L4"}
NOSET = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
DEPLOYMENTS = {
    "one GPU for both": Deployment(
        (Node("a", "H100"),), {}, (("H100",),), ("H100",), (0.5, 0.5), is_shared=True
    ),
    "four ranks and an L4 elsewhere": Deployment(
        (FOUR, L4), {"target.tensor_parallel": 4, **BY_TYPE}, (("H100",) * 4,), ("L4",)
    ),
    "two replicas of two ranks": Deployment(
        (FOUR, L4),
        {"target.tensor_parallel": 2, "target.replicas": 2, **BY_TYPE},
        (("H100",) * 2,) * 2,
        ("L4",),
    ),
    "ranks on two nodes": Deployment(
        (Node("a", "H100,H100"), Node("b", "H100,H100")),
        {"target.tensor_parallel": 2, "target.placement": "STRICT_SPREAD"},
        (("H100",) * 2,),
        ("H100",),
        nodes_of_a_target=2,
    ),
    "a draft on the CPU": Deployment(
        (Node("a", "H100"),), {"target.gpus": 1, "drafts.model.gpus": 0}, (("H100",),), (CPU,)
    ),
    "ranks that leave a draft a tenth": Deployment(
        (Node("a", "H100,H100"),),
        {"target.tensor_parallel": 2, "target.gpus": 0.9},
        (("H100",) * 2,),
        ("H100",),
        (0.9, 0.1),
        is_shared=True,
    ),
    "Ray sets no CUDA_VISIBLE_DEVICES": Deployment(
        (FOUR, L4),
        {"target.tensor_parallel": 2, "target.replicas": 2, **BY_TYPE},
        (("H100",) * 2,) * 2,
        ("L4",),
        environment=NOSET,
    ),
    "Ray sets none, a draft on the CPU": Deployment(
        (Node("a", "H100,H100"),),
        {"target.tensor_parallel": 2, "drafts.model.gpus": 0},
        (("H100",) * 2,),
        (CPU,),
        environment=NOSET,
    ),
    "a node that has the last two of its GPUs": Deployment(
        (Node("a", "L4,L4,H100,H100", visible="2,3"),), {"target.gpus": 1}, (("H100",),), ("H100",)
    ),
    "a node whose GPUs have UUIDs": Deployment(
        (Node("a", "L4,H100,H100", visible="GPU-a2,GPU-a1"),), {"target.gpus": 1}, (("H100",),), ("H100",)
    ),
}


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_processes_of_a_deployment_see_and_take_the_gpus_that_ray_has_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    deployment = DEPLOYMENTS[name]
    monkeypatch.setenv("PYTHONPATH", f"{PROGRAM}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    for variable, value in deployment.environment.items():
        monkeypatch.setenv(variable, value)
    with raylets(num_cpus=2, num_gpus=0) as cluster:
        for node in deployment.nodes:
            with monkeypatch.context() as of_node:
                of_node.setenv("DECLARED_GPUS", f"{node.name}:{node.gpus}")
                if node.visible is not None:
                    of_node.setenv("CUDA_VISIBLE_DEVICES", node.visible)
                resources = {f"accelerator_type:{kind}": 1.0 for kind in set(node.types)}
                cluster.add_node(num_cpus=2, num_gpus=node.count, resources=resources)
        settings = {**SERVED, **deployment.settings}
        with serving(tmp_path, settings, ray_address=cluster.address) as service:
            workers = workers_of(service, len(deployment.target) + len(deployment.draft))
            answers(service)
    print(table(name, workers))
    check(deployment, workers)


def workers_of(service: Service, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def all_have_joined() -> bool:
        found[:] = httpx.get(f"{service.http}/health", timeout=LIMIT_S).json()["workers"]
        return len(found) == count

    wait_until(all_have_joined, START_S)
    return found


def answers(service: Service) -> None:
    body = {"prompt": '{"name": "', "max_tokens": 8, "temperature": 0}
    response = httpx.post(f"{service.http}/v1/completions", json=body, timeout=LIMIT_S)
    assert response.status_code == 200, response.text


def check(deployment: Deployment, workers: list[dict[str, Any]]) -> None:
    places = {
        role: [worker["places"] for worker in workers if worker["role"] == role]
        for role in ("target", "draft")
    }
    assert sorted(tuple(kind_of(place) for place in replica) for replica in places["target"]) == sorted(
        deployment.target
    )
    assert sorted(kind_of(place) for [place] in places["draft"]) == sorted(deployment.draft)
    for replica in places["target"]:
        assert [place["rank"] for place in replica] == list(range(len(replica)))
        assert len({place["node"] for place in replica}) == deployment.nodes_of_a_target
    everybody = [place for role in places.values() for replica in role for place in replica]
    assert len({place["pid"] for place in everybody}) == len(everybody)
    taken = [place["sees"][0] for place in everybody if place["device"] != CPU]
    assert len(set(taken)) == len(taken) - deployment.is_shared
    for role, part in zip(("target", "draft"), deployment.parts, strict=True):
        for place in (place for replica in places[role] for place in replica):
            if place["device"] == CPU:
                assert (place["gpus"], place["sees"]) == ("", [])
                continue
            assert place["device"] == "cuda:0"
            assert len(place["sees"]) == len(place["gpus"].split(",")) == 1
            assert place["memory"] == {"H100": 80, "L4": 24}[kind_of(place)] * GB
            assert place["may_take"] == pytest.approx(part * place["memory"], rel=1e-3)
    ranks = [place for replica in places["target"] for place in replica if len(replica) > 1]
    assert all(place["interface"] for place in ranks)


def kind_of(place: dict[str, Any]) -> str:
    """Type of the GPU that a process takes, or the CPU."""
    return CPU if place["device"] == CPU else str(place["sees"][0].split()[0])


def table(name: str, workers: list[dict[str, Any]]) -> str:
    """A line for each process."""
    ids = sorted({place["node"] for worker in workers for place in worker["places"]})
    lines = [f"\n{name}"]
    for worker in sorted(workers, key=lambda worker: str(worker["role"]), reverse=True):
        frontend = f"Ray gives {', '.join(worker['gpus']) or 'none'}"
        lines.append(f"  {worker['role']:6}  frontend  node {ids.index(worker['node'])}  {frontend}")
        for place in worker["places"]:
            gb = f"{place['may_take'] / GB:.1f} of {place['memory'] / GB:.1f} GB"
            lines.append(
                f"  {'':6}  rank {place['rank']}    node {ids.index(place['node'])}"
                f"  CUDA_VISIBLE_DEVICES={place['gpus']!r} sees {', '.join(place['sees']) or 'none'},"
                f" takes {place['device']}, {gb}; {place['threads']} threads; {place['interface'] or 'alone'}"
            )
    return "\n".join(lines)
