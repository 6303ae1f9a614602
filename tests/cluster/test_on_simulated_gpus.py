"""A target of four ranks and a draft, each on a simulated GPU of its own, inside real workers of Serve.

GPUs and NCCL are simulated: tests/support/simulated_cuda/README.md. The product is told nothing of it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from outrider.demo.prompts import KINDS, prompts
from tests.support.machines import raylets
from tests.support.patience import LIMIT_S, START_S
from tests.support.running import serving
from tests.support.served import SERVED
from tests.support.simulated_cuda.in_service import machine_with_gpus
from tests.support.simulated_cuda.install import needs_compiler

pytestmark = [needs_compiler, pytest.mark.slow]

RANKS = 4
CACHE = 2**22  # bytes
MODES: tuple[dict[str, Any], ...] = ({"mode": "off"}, {"mode": "fixed", "depth": 3})


@dataclass(frozen=True)
class OnGpus:
    http: str  # base URL
    loaded: dict[int, dict[str, Any]]  # what each process with a model told, by its id


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnGpus]:
    folder, notes = tmp_path_factory.mktemp("service"), tmp_path_factory.mktemp("notes")
    settings = {
        **SERVED,
        "target.tensor_parallel": RANKS,
        "target.gpus": 1,
        "target.cache_memory": CACHE,
        "target.step_timeout_s": LIMIT_S,  # Triton's interpreter is slow
        "drafts.model.gpus": 1,
        "drafts.model.cache_memory": CACHE,
        "drafts.model.step_timeout_s": LIMIT_S,
    }
    with (
        machine_with_gpus(RANKS + 1, notes),
        raylets(num_cpus=4, num_gpus=RANKS + 1) as cluster,
        serving(folder, settings, ray_address=cluster.address) as service,
    ):
        yield OnGpus(service.http, {int(file.name): json.loads(file.read_text()) for file in notes.iterdir()})


def answer(http: str, number: int, mode: dict[str, Any]) -> dict[str, Any]:
    request = {
        "prompt": prompts(KINDS[number % len(KINDS)], 1)[0],
        "max_tokens": 12,
        "temperature": (0.0, 0.8)[number % 2],
        "seed": number,
        "speculation": {**mode, "report": True},
    }
    response = httpx.post(f"{http}/v1/completions", json=request, timeout=START_S)
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()
    return told


def workers(http: str) -> dict[str, dict[str, Any]]:
    """Returns places by their roles."""
    return {
        worker["role"]: worker for worker in httpx.get(f"{http}/health", timeout=LIMIT_S).json()["workers"]
    }


def test_processes_load_their_models_onto_their_own_gpus(on_gpus: OnGpus) -> None:
    pids = {role: worker["ranks"] for role, worker in workers(on_gpus.http).items()}
    ranks = [on_gpus.loaded[pid] for pid in pids["target"]]
    [draft] = (on_gpus.loaded[pid] for pid in pids["draft"])
    assert [told["rank"] for told in ranks] == [*range(RANKS)]
    assert sorted(told["visible"] for told in (*ranks, draft)) == [str(gpu) for gpu in range(RANKS + 1)]
    assert {told["device"] for told in (*ranks, draft)} == {"cuda:0"}
    assert all(told["allocated"] > CACHE for told in (*ranks, draft))


def test_workers_are_as_fast_as_their_gpus_allow(on_gpus: OnGpus) -> None:
    assert [worker["slow_because"] for worker in workers(on_gpus.http).values()] == [[], []]


@pytest.mark.parametrize("number", range(3))
def test_ranks_on_gpus_say_what_one_process_says_with_drafts_and_without(
    on_gpus: OnGpus, client: httpx.Client, number: int
) -> None:
    alone = answer(str(client.base_url).rstrip("/"), number, MODES[0])["choices"][0]["text"]
    plain, drafted = (answer(on_gpus.http, number, mode) for mode in MODES)
    assert [told["choices"][0]["text"] for told in (plain, drafted)] == [alone, alone]
    assert drafted["usage"]["speculation"]["drafted_by"]["model"]["reached"] > 0
