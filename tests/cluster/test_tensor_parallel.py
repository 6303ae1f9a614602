"""Targets of two processes each: the texts of one process, and no rank is lost without its group.

Two groups on one raylet. Where one is lost under a stream, the stream goes on at the other.
"""

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from outrider.demo.prompts import KINDS, prompts
from tests.support.in_ray import ask_ray, left_in_ray
from tests.support.machines import Machines, agree, body, plain, raylets, stream
from tests.support.patience import PATIENCE, START_S, wait_until
from tests.support.running import serving
from tests.support.served import SERVED

STEP_TIMEOUT_S = 5.0 * PATIENCE
MODES: tuple[dict[str, Any], ...] = (
    {"mode": "off"},
    {"mode": "auto"},
    {"mode": "fixed", "depth": 4},
    {"mode": "fixed", "depth": 8},
    {"mode": "fixed", "depth": 4, "drafter": "ngram"},
)


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    settings = {
        **SERVED,
        "target.tensor_parallel": 2,
        "target.replicas": 2,
        "target.step_timeout_s": STEP_TIMEOUT_S,
    }
    folder = tmp_path_factory.mktemp("groups")
    with raylets(num_cpus=2) as cluster, serving(folder, settings, ray_address=cluster.address) as service:
        machines = Machines(service.http, service.grpc, cluster)
        machines.wait_for("target", 2)
        machines.wait_for("draft", 1)
        yield machines


def texts(http: str, count: int) -> list[str]:
    """Returns the texts of requests in all modes, greedy and seeded."""
    found = []
    for number in range(count):
        request = {
            "prompt": prompts(KINDS[number % len(KINDS)], 4)[number % 4],
            "max_tokens": 32,
            "temperature": (0.0, 0.8, 1.0)[number % 3],
            "seed": number,
            "speculation": MODES[number % len(MODES)],
        }
        response = httpx.post(f"{http}/v1/completions", json=request, timeout=START_S)
        assert response.status_code == 200, response.text
        found.append(response.json()["choices"][0]["text"])
    return found


def test_ranks_answer_as_one_process(groups: Machines, client: httpx.Client) -> None:
    ranks = [worker["ranks"] for worker in groups.workers("target")]
    assert [len(pids) for pids in ranks] == [2, 2]
    assert texts(groups.http, 10) == texts(str(client.base_url).rstrip("/"), 10)


def busy_group(groups: Machines) -> tuple[int, int, int]:
    """Process ids of rank 0, rank 1 and the frontend of the group where the stream is."""
    [worker] = groups.busy("target")
    [leader, rank] = worker["ranks"]
    return leader, rank, worker["pid"]


def lose(groups: Machines, harm: Callable[[int, int], None]) -> None:
    """Harms the group where a stream is: the text stays as it is, and nothing is left of the group."""
    request = body(1, max_tokens=200, min_tokens=200)
    expected = plain(groups, request)
    lost: list[int] = []

    def strike() -> None:
        lost.extend(busy_group(groups))
        harm(*lost[:2])

    answer = stream(groups, request, after=3, then=strike)
    agree(answer, expected)
    assert answer.changes_of_target == 1
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in lost))


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def starve(pid: int) -> None:
    """It gets no more memory than it has; what an allocator has only reserved is not had."""
    process = psutil.Process(pid)
    process.rlimit(psutil.RLIMIT_DATA, (process.memory_info().data, psutil.RLIM_INFINITY))


@pytest.mark.slow  # to the gateway it is a target that was killed
def test_rank_killed_under_a_stream_takes_its_group_with_it(groups: Machines) -> None:
    lose(groups, lambda _, rank: kill(rank))


@pytest.mark.slow
@pytest.mark.parametrize(
    "harm",
    [
        lambda leader, _: kill(leader),
        lambda _, rank: kill(rank),
        lambda _, rank: os.kill(rank, signal.SIGSTOP),
    ],
    ids=["rank 0 killed", "rank 1 killed", "rank 1 stopped"],
)
def test_group_that_was_lost_is_replaced_as_a_whole_and_leaves_nothing(
    groups: Machines, harm: Callable[[int, int], None]
) -> None:
    until_complete(groups)
    before = left_in_ray(groups.cluster.address)
    shared = orphaned_memory()
    lose(groups, harm)
    until_complete(groups)
    wait_until(lambda: left_in_ray(groups.cluster.address) == before, START_S)
    wait_until(lambda: orphaned_memory() <= shared, START_S)


@pytest.mark.slow
def test_rank_killed_while_nobody_asks_takes_its_group_with_it(groups: Machines) -> None:
    until_complete(groups)
    worker = groups.workers("target")[0]
    assert not groups.busy_pids("target")
    kill(worker["ranks"][1])
    wait_until(lambda: not psutil.pid_exists(worker["pid"]))


@pytest.mark.slow
def test_rank_out_of_memory_takes_its_group_with_it(groups: Machines) -> None:
    """A prompt that takes more than there is; it is answered by those that come after."""
    until_complete(groups)
    long = body(1, prompt=1600 * "x ", max_tokens=20, min_tokens=20)
    ranks = [rank for worker in groups.workers("target") for rank in worker["ranks"][1:]]
    lost = groups.pids("target") | {*ranks}
    for rank in ranks:
        starve(rank)
    answer = stream(groups, long)
    assert answer.changes_of_target >= 1
    agree(answer, plain(groups, long))
    until_complete(groups)
    assert not any(psutil.pid_exists(pid) for pid in lost)


def until_complete(groups: Machines) -> None:
    """Two groups, all of whose processes live."""
    groups.wait_for("target", 2)
    wait_until(
        lambda: all(psutil.pid_exists(pid) for w in groups.workers("target") for pid in w["ranks"]),
        START_S,
    )


def orphaned_memory() -> set[str]:
    """Files of shared memory that no process has mapped, as other programs on this machine have theirs."""
    files = {str(file.inode()): file.name for file in os.scandir("/dev/shm")}
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended
            mapped |= {line.split()[4] for line in maps.read_text().splitlines() if "/dev/shm/" in line}
    return {name for inode, name in files.items() if inode not in mapped}


@pytest.mark.slow
def test_heads_beside_the_first_rank_draft_for_its_group(tmp_path: Path, client: httpx.Client) -> None:
    own = {"target.drafters.eagle3": "{}", "gateway.drafters": json.dumps(["eagle3"])}
    with serving(tmp_path, {**SERVED, **own, "target.tensor_parallel": 2}) as service:
        assert texts(service.http, 10) == texts(str(client.base_url).rstrip("/"), 10)
        request = {
            "prompt": prompts("json", 1)[0],
            "max_tokens": 32,
            "seed": 1,
            "speculation": {**MODES[2], "report": True},
        }
        answer = httpx.post(f"{service.http}/v1/completions", json=request, timeout=START_S).json()
        assert answer["usage"]["speculation"]["drafted_by"]["eagle3"]["accepted"] > 0
        (worker,) = [
            worker for worker in httpx.get(f"{service.http}/health").json()["workers"] if worker["ranks"][1:]
        ]
        assert len(worker["ranks"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "nodes"), [("STRICT_PACK", 1), ("STRICT_SPREAD", 2)])
def test_ranks_are_placed_as_told(tmp_path: Path, placement: str, nodes: int) -> None:
    """The draft, with a part of a resource of its own, on the second of two raylets."""
    settings = {
        **SERVED,
        "target.tensor_parallel": 2,
        "target.placement": placement,
        "drafts.model.resources": json.dumps({"cheap": 0.5}),
    }
    with raylets(num_cpus=2) as cluster:
        cluster.add_node(num_cpus=2, resources={"cheap": 1})
        with serving(tmp_path, settings, ray_address=cluster.address) as service:
            found = ask_ray(
                cluster.address,
                "[group] = ray.util.placement_group_table().values()\n"
                "answer = [group['strategy'], *group['bundles_to_node_id'].values()]\n",
            )
            assert found[0] == placement
            assert len({*found[1:]}) == nodes
            assert len(texts(service.http, 3)) == 3
