"""How many replicas are wanted under which load; a real service grows and shrinks under its streams."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.config import AutoscalingContext

from actors.metrics import CACHE_IN_USE, FIRST_TOKEN, SEQUENCES
from cluster.arguments import read_settings
from cluster.autoscaling import FirstTokenPolicy, LoadPolicy, autoscaling
from cluster.groups import AutoscalingSettings, DraftSettings
from cluster.settings_errors import SettingsError
from outrider.demo import written_out
from outrider.demo.prompts import DEMO
from tests.support.in_ray import left_in_ray
from tests.support.machines import raylets
from tests.support.patience import LIMIT_S, START_S, wait_until
from tests.support.running import Service, serving
from tests.support.served import CACHE

# Tokens. Long answers end at different times, and take much longer than Serve keeps a replica that leaves:
# some 8 s. Only the large demo target is slow enough for that on every machine.
LONG, SHORT = (300, 260, 220, 190, 150, 110), 25
LARGE = {"target": str(written_out.target()), "target.dtype": "float32", "target.threads": 1}
AT_ONCE = {"autoscaling.up_delay_s": 0, "autoscaling.down_delay_s": 0}
TARGETS = {"target.max_replicas": 2, "target.sequences_per_replica": 7}
DRAFTS = {
    "draft": str(DEMO / "draft"),
    "gateway.drafters": '["model"]',
    "drafts.model.max_replicas": 2,
    "drafts.model.sequences_per_replica": 7,
}


def context(
    reported: dict[str, list[float]], replicas: int = 2, wanted: int | None = None
) -> AutoscalingContext:
    deployment = DeploymentID(name="target")
    ids = [ReplicaID(unique_id=str(number), deployment_id=deployment) for number in range(replicas)]
    return AutoscalingContext(
        deployment_id=deployment,
        deployment_name=deployment.name,
        app_name="default",
        current_num_replicas=replicas,
        target_num_replicas=replicas if wanted is None else wanted,
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
    worker = DraftSettings(model="d", replicas=2, max_replicas=5, sequences_per_replica=32)
    config = autoscaling(worker, AutoscalingSettings(cache_in_use=0.8, up_delay_s=3.0, down_delay_s=60.0))
    assert (config.min_replicas, config.max_replicas) == (2, 5)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (3.0, 60.0)
    policy = config.policy.get_policy()(**config.policy.policy_kwargs)
    assert policy(context({SEQUENCES: [100.0, 0.0], CACHE_IN_USE: [0.0, 0.0]})) == (4, {})


IDLE, BUSY = [1.0, 1.0], [30.0, 30.0]  # sequences; 32 for each replica would do


@pytest.mark.parametrize(
    ("first_s", "sequences", "wanted"),
    [
        ([2.5, 0.1], BUSY, 3),  # late at one replica: one more
        ([2.5, 0.1], IDLE, 3),
        ([2.0, 2.0], BUSY, 2),  # as aimed at
        ([0.1, 0.1], BUSY, 2),  # early, and fewer would be too few
        ([0.1, 0.1], IDLE, 1),
        ([0.0, 0.0], [0.0, 0.0], 1),  # nobody asks
    ],
    ids=str,
)
def test_late_first_tokens_add_a_replica_and_idle_ones_are_given_back(first_s, sequences, wanted):
    reported = {FIRST_TOKEN: first_s, SEQUENCES: sequences, CACHE_IN_USE: [0.1, 0.1]}
    assert FirstTokenPolicy(2.0, 32, 0.8)(context(reported)) == (wanted, {})


def test_first_token_policy_gives_back_one_replica_at_a_time():
    reported = {FIRST_TOKEN: [0.1] * 4, SEQUENCES: [1.0] * 4, CACHE_IN_USE: [0.1] * 4}
    assert FirstTokenPolicy(2.0, 32, 0.8)(context(reported, replicas=4)) == (3, {})


@pytest.mark.parametrize(
    ("reported", "wanted"),
    [({}, 2), ({SEQUENCES: BUSY}, 2), ({FIRST_TOKEN: [9.0, 9.0], SEQUENCES: BUSY}, 3)],
    ids=["nobody has reported", "no times", "one is still starting"],
)
def test_first_token_policy_holds_what_it_cannot_judge(reported, wanted):
    assert FirstTokenPolicy(2.0, 32, 0.8)(context(reported, wanted=wanted)) == (wanted, {})


def test_serve_is_told_the_aim_of_a_target_in_seconds():
    settings = read_settings({"target": "t", "target.max_replicas": "3", "target.ttft_target_s": "1.5"})
    policy = autoscaling(settings.target, settings.autoscaling).policy
    late = context({FIRST_TOKEN: [1.6, 0.0], SEQUENCES: IDLE, CACHE_IN_USE: [0.0, 0.0]})
    assert policy.get_policy()(**policy.policy_kwargs)(late) == (3, {})


def test_aim_in_seconds_without_room_to_grow_is_refused():
    with pytest.raises(SettingsError, match=r"target\.ttft_target_s=1\.5 without max_replicas: give that"):
        read_settings({"target": "t", "target.ttft_target_s": "1.5"})


class Stream(threading.Thread):
    """Asks for the same answer again and again until it is stopped."""

    def __init__(self, service: Service, role: str, seed: int, prompt: str, tokens: int) -> None:
        """role: of the workers whose loss is counted; a drained target is left without one."""
        super().__init__()
        self.stopped = threading.Event()
        self.texts: list[str] = []
        self.left = 0  # times that the answers left a worker
        self.error: Exception | None = None
        self._counter = f"lost_{role}s"
        self._url = f"{service.http}/v1/completions"
        asked = {"mode": "fixed", "depth": 2} if role == "draft" else {"mode": "off"}
        self._body = {
            "prompt": prompt,
            "max_tokens": tokens,
            "min_tokens": tokens,
            "temperature": 0.8,
            "seed": seed,
            "speculation": {**asked, "report": True},
        }

    def run(self) -> None:
        try:
            while not self.stopped.is_set():
                self._ask()
        except Exception as error:
            self.error = error

    def _ask(self) -> None:
        body: dict[str, Any] = httpx.post(self._url, json=self._body, timeout=START_S).json()
        self.texts.append(body["choices"][0]["text"])
        report = body["usage"]["speculation"]
        self.left += report[self._counter] + report["moves"]


@contextmanager
def running(streams: list[Stream]) -> Iterator[None]:
    for stream in streams:
        stream.start()
    try:
        yield
    finally:
        stop(streams)


def stop(streams: list[Stream]) -> None:
    """Returns when their last answers have come."""
    for stream in streams:
        stream.stopped.set()
    for stream in streams:
        stream.join()


def processes(service: Service, role: str) -> list[set[int]]:
    """Returns the process ids of each worker that the gateway knows and whose processes live."""
    workers = httpx.get(f"{service.http}/health", timeout=LIMIT_S).json()["workers"]
    pids = [{worker["pid"], *worker["ranks"]} for worker in workers if worker["role"] == role]
    return [own for own in pids if all(map(psutil.pid_exists, own))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "settings"),
    [("target", TARGETS), ("target", {**TARGETS, "target.tensor_parallel": 2}), ("draft", DRAFTS)],
    ids=["target", "target of two processes", "draft"],
)
def test_worker_that_leaves_under_streams_changes_no_word_and_leaves_nothing_behind(
    role: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many streams bring a second worker; six, on both of them, are the work of one."""
    monkeypatch.setenv("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")
    fields = {**LARGE, "target.cache_memory": CACHE, **AT_ONCE, **settings}
    with raylets(num_cpus=4) as cluster, serving(tmp_path, fields, ray_address=cluster.address) as service:
        wait_until(lambda: len(processes(service, role)) == 1, START_S)
        [stays] = processes(service, role)
        before = left_in_ray(cluster.address)
        streams = [Stream(service, role, seed, "once", tokens) for seed, tokens in enumerate(LONG)]
        others = [Stream(service, role, seed, "x", SHORT) for seed in range(9)]
        with running(others):
            wait_until(lambda: len(processes(service, role)) == 2, START_S)
            [leaves] = [own for own in processes(service, role) if own != stays]
            with running(streams):
                stop(others)
                wait_until(lambda: len(processes(service, role)) == 1, START_S)
                wait_until(lambda: all(len(stream.texts) > 1 for stream in streams), START_S)
        assert [stream.error for stream in [*streams, *others]] == [None] * 15
        assert all(len(set(stream.texts)) == 1 for stream in streams)
        assert sum(stream.left for stream in streams) > 0
        wait_until(lambda: not any(map(psutil.pid_exists, leaves)), START_S)
        assert processes(service, role) == [stays]
        assert left_in_ray(cluster.address) == before
