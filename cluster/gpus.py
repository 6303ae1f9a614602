"""GPUs of nodes, from their drivers. Ray's workers run this module on each node, so its imports are light."""

import logging
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.groups import WorkerSettings
from cluster.settings import Settings

logger = logging.getLogger(f"ray.serve.{__name__}")

ASK_S = 60.0  # seconds for a process to start on every node, and its driver to answer
ALIKE = 1.1  # largest ratio of the memory of two GPUs that count as one size


def gpus_here() -> list[int]:
    """Returns bytes of each GPU of this machine, from its driver: torch would allocate memory on each GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True)
    return [int(line) * 2**20 for line in answer.stdout.split()] if answer.returncode == 0 else []


def ask_nodes(settings: Settings) -> dict[str, int]:
    """Returns bytes of a GPU by group of settings, for workers whose nodes have GPUs of one size.

    Ray's names of accelerators do not determine the size: an A100 has 40 GB or 80 GB.
    """
    workers: dict[str, WorkerSettings] = {"target": settings.target}
    workers |= {f"drafts.{name}": draft for name, draft in settings.drafts.items()}
    on_gpus = {group: worker for group, worker in workers.items() if worker.gpus}
    if not on_gpus:
        return {}
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    ask = ray.remote(gpus_here)
    try:
        asked = [ask.options(num_cpus=0, scheduling_strategy=place).remote() for place in places]
        answers = ray.get(asked, timeout=ASK_S)
    except RayError:  # a node was lost, or is too slow: its GPUs are not known
        return {}
    there = list(zip((node["Resources"] for node in nodes), answers, strict=True))
    found = {group: size_for(worker, there) for group, worker in on_gpus.items()}
    logger.debug("bytes of a GPU by group, as %d nodes report them: %s", len(nodes), found)
    return {group: size for group, size in found.items() if size is not None}


def size_for(worker: WorkerSettings, there: Iterable[tuple[Mapping[str, Any], list[int]]]) -> int | None:
    """Returns bytes of a GPU on the nodes that can hold a worker; None: not known, or sizes differ.

    there: resources of each node, and bytes of its GPUs.
    """
    wanted = {*worker.resources} | (
        {f"accelerator_type:{worker.accelerator}"} if worker.accelerator else set()
    )
    sizes = [size for resources, gpus in there if wanted <= resources.keys() for size in gpus]
    if not sizes or max(sizes) > ALIKE * min(sizes):
        return None
    return min(sizes)
