"""A target is killed under streams that its heads draft: they go on at another, drafted by its heads."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.machines import Answer, Machines, agree, body, plain, raylets, stream
from tests.support.running import serving
from tests.support.served import SERVED

pytestmark = pytest.mark.slow

STREAMS, TOKENS = 6, 150


@pytest.fixture(scope="module", params=["eagle3", "medusa"])
def machines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    own = {f"target.drafters.{request.param}": "{}", "gateway.drafters": json.dumps([request.param])}
    settings = {**SERVED, **own, "target.replicas": 2}
    folder = tmp_path_factory.mktemp("heads")
    with raylets(num_cpus=2) as cluster, serving(folder, settings, ray_address=cluster.address) as service:
        machines = Machines(service.http, service.grpc, cluster)
        machines.wait_for("target", 2)
        yield machines


def requests() -> list[dict[str, Any]]:
    fields = {"max_tokens": TOKENS, "min_tokens": TOKENS}
    return [body(seed, temperature=(0.0, 0.7, 1.0)[seed % 3], **fields) for seed in range(STREAMS)]


@pytest.mark.parametrize("process", ["frontend", "engine"])
def test_target_killed_under_streams_that_its_heads_draft(machines: Machines, process: str) -> None:
    asked = requests()
    expected = [plain(machines, request) for request in asked]

    def kill() -> None:
        worker = machines.busy("target")[0]
        os.kill(worker["pid"] if process == "frontend" else worker["ranks"][0], signal.SIGKILL)

    def read(number: int) -> Answer:
        if number == 0:
            return stream(machines, asked[number], after=5, then=kill)
        return stream(machines, asked[number])

    with ThreadPoolExecutor(STREAMS) as pool:
        answers = [*pool.map(read, range(STREAMS))]
    for answer, plainly in zip(answers, expected, strict=True):
        agree(answer, plainly)
    usage = [answer.usage["speculation"] for answer in answers]
    assert sum(answer.changes_of_target for answer in answers) > 0
    assert all(answer["accepted"] > 0 and len(answer["drafted_by"]) == 1 for answer in usage)
    machines.wait_for("target", 2)
    again = stream(machines, asked[1])
    agree(again, expected[1])
    assert again.usage["speculation"]["accepted"] > 0
