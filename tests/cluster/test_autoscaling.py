"""How many replicas are wanted under which load; a real service grows and shrinks under its streams."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.config import AutoscalingContext

from actors.usage import CACHE_IN_USE, SEQUENCES
from bench.running import Service, serving
from cluster.autoscaling import LoadPolicy, autoscaling
from cluster.settings import Settings
from models.prompts import prompts
from tests.cluster.conftest import SERVED
from tests.cluster.test_failures import wait_until

SCALED_S = 90.0  # in which reports, averages, delays and a start add up, on a slow machine
SCALING = {"max_targets": 2, "sequences_per_target": 2, "scale_up_delay_s": 0, "scale_down_delay_s": 0}


def context(reported: dict[str, list[float]], replicas: int = 2) -> AutoscalingContext:
    deployment = DeploymentID(name="TargetWorker")
    ids = [ReplicaID(unique_id=str(number), deployment_id=deployment) for number in range(replicas)]
    return AutoscalingContext(
        deployment_id=deployment,
        deployment_name=deployment.name,
        app_name="default",
        current_num_replicas=replicas,
        target_num_replicas=replicas,
        running_replicas=ids,
        total_num_requests=0,
        total_queued_requests=0,
        aggregated_metrics={name: dict(zip(ids, values, strict=False)) for name, values in reported.items()},
        raw_metrics={},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=9,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=0.0,
        config=None,
    )


@pytest.mark.parametrize(
    ("reported", "wanted"),
    [
        ({}, 2),  # nobody has reported: as many as there are
        ({SEQUENCES: [0.0, 0.0], CACHE_IN_USE: [0.0, 0.0]}, 1),
        ({SEQUENCES: [20.0, 12.0], CACHE_IN_USE: [0.1, 0.1]}, 1),
        ({SEQUENCES: [32.0, 1.0], CACHE_IN_USE: [0.1, 0.1]}, 2),
        ({SEQUENCES: [40.0, 24.0 + 1e-9], CACHE_IN_USE: [0.1, 0.1]}, 2),
        ({SEQUENCES: [60.0, 60.0], CACHE_IN_USE: [0.1, 0.1]}, 4),
        ({SEQUENCES: [3.0, 3.0], CACHE_IN_USE: [1.0, 0.9]}, 3),  # few, but long
        ({SEQUENCES: [70.0], CACHE_IN_USE: [0.2]}, 3),  # the other has just started
    ],
    ids=str,
)
def test_neither_sequences_nor_blocks_exceed_what_is_aimed_at(reported, wanted):
    assert LoadPolicy(32, 0.8)(context(reported)) == (wanted, {})


def test_serve_is_told_limits_delays_and_the_policy():
    config = autoscaling(2, 5, 32, 0.8, 3.0, 60.0)
    assert (config.min_replicas, config.max_replicas) == (2, 5)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (3.0, 60.0)
    policy = config.policy.get_policy()(**config.policy.policy_kwargs)
    assert policy(context({SEQUENCES: [100.0, 0.0], CACHE_IN_USE: [0.0, 0.0]})) == (4, {})


@pytest.mark.parametrize("field", ["max_targets", "max_drafts"])
def test_fewer_at_most_than_at_least_is_refused_by_name(field):
    with pytest.raises(ValueError, match=f"{field}=1 is below {field.removeprefix('max_')}=2"):
        Settings(**{field: 1, field.removeprefix("max_"): 2})


class Streams(threading.Thread):
    """Asks for the same long answer again and again until it is stopped."""

    def __init__(self, service: Service, seed: int) -> None:
        super().__init__()
        self.stopped = threading.Event()
        self.texts: list[str] = []
        self.lost_targets = 0
        self.error: Exception | None = None
        self._url = f"{service.http}/v1/completions"
        self._body = {
            "prompt": prompts("stories", 1)[0],
            "max_tokens": 1500,
            "min_tokens": 1500,
            "temperature": 0.8,
            "seed": seed,
            "speculation": {"mode": "off"},  # answers last longer than a replica's last seconds
        }

    def run(self) -> None:
        try:
            while not self.stopped.is_set():
                self._ask()
        except Exception as error:
            self.error = error

    def _ask(self) -> None:
        body: dict[str, Any] = httpx.post(self._url, json=self._body, timeout=180).json()
        self.texts.append(body["choices"][0]["text"])
        self.lost_targets += body["usage"]["speculation"]["lost_targets"]


@pytest.fixture
def scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")
    with serving(tmp_path, **{**SERVED, **SCALING}) as service:
        yield service


@pytest.mark.slow
def test_a_target_that_leaves_in_the_middle_of_a_stream_changes_no_word(scaling: Service) -> None:
    """Four streams bring a second target, two are one's work: one of them is on that which leaves."""
    few = [Streams(scaling, seed) for seed in range(2)]
    many = [Streams(scaling, seed) for seed in range(2, 5)]
    for streams in [*few, *many]:
        streams.start()
    try:
        wait_until(lambda: len(targets(scaling)) == 2, SCALED_S)
        for streams in many:
            streams.stopped.set()
        for streams in many:
            streams.join()
        wait_until(lambda: len(targets(scaling)) == 1, SCALED_S)
    finally:
        for streams in [*few, *many]:
            streams.stopped.set()
    for streams in few:
        streams.join()
        streams.stopped.clear()
        streams._ask()  # on the one target that is left
    assert [streams.error for streams in [*few, *many]] == [None] * 5
    assert all(len(set(streams.texts)) == 1 and len(streams.texts) > 1 for streams in few)
    assert sum(streams.lost_targets for streams in few) > 0


def targets(service: Service) -> set[int]:
    """Process ids of the targets that the gateway knows and that live."""
    workers = httpx.get(f"{service.http}/health", timeout=30).json()["workers"]
    return {
        worker["pid"] for worker in workers if worker["role"] == "target" and psutil.pid_exists(worker["pid"])
    }
