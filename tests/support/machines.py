"""Several machines, simulated by raylets on this machine, a service on them, and readers of its streams."""

import contextlib
import gc
import json
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil  # type: ignore[import-untyped]
import pytest
import yaml
from ray.cluster_utils import Cluster

from cluster.start import ADD_SERVICERS
from outrider.demo.prompts import KINDS, prompts
from protos import generation_pb2, generation_pb2_grpc
from tests.support.patience import LIMIT_S, START_S, wait_until
from tests.support.running import free_port, serve_run

TOKENS = 400


@contextmanager
def raylets(**head: Any) -> Iterator[Cluster]:
    """Yields a cluster of one raylet with these arguments. More raylets can be added while it runs."""
    environment = {
        # As in our own start of Ray.
        "RAY_worker_niceness": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_USE_GRPC": "1",
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": "-1",
        # Proxies would share one port here, and a proxy of a machine without replicas would close it.
        "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_WORKER_PROXY_GRPC_PORT": str(free_port()),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        # Ray tries the dashboard's port even without a dashboard, and leaks a socket if the port is taken.
        no_dashboard: dict[str, Any] = {"include_dashboard": False, "dashboard_port": free_port()}
        cluster = Cluster(initialize_head=True, head_node_args={**no_dashboard, **head})
        try:
            yield cluster
        finally:
            cluster.shutdown()
            with warnings.catch_warnings():  # otherwise a later test fails for what Ray leaves open
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()


@dataclass
class Answer:
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    took_s: float = 0.0
    longest_pause_s: float = 0.0

    @property
    def changes_of_target(self) -> int:
        """Number of times the answer continued at another target, because its target was lost or late."""
        report = self.usage["speculation"]
        return int(report["lost_targets"] + report["moves"])


@dataclass(frozen=True)
class Running:
    """Running service."""

    http: str  # base URL
    grpc: str  # host:port

    def is_ready(self) -> bool:
        """Whether a target has joined."""
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.http}/health", timeout=LIMIT_S).status_code == 200
        return False

    def workers(self, role: str) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.http}/health", timeout=LIMIT_S).json()
        return [worker for worker in answer["workers"] if worker["role"] == role]

    def pids(self, role: str) -> set[int]:
        """Returns the process ids of the frontends of live workers."""
        return {worker["pid"] for worker in self.workers(role) if psutil.pid_exists(worker["pid"])}

    def engines(self, role: str) -> set[int]:
        """Returns the process ids of the workers' engines; of rank 0 if there are several ranks."""
        return {worker["ranks"][0] for worker in self.workers(role)}

    def wait_for(self, role: str, count: int) -> None:
        """Waits until a number of live workers of a role have joined."""
        wait_until(lambda: len(self.pids(role)) == count, START_S)

    def loads(self) -> generation_pb2.Loads:
        with grpc.insecure_channel(self.grpc) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            return stub.GetLoads(generation_pb2.GetLoadsRequest(), timeout=LIMIT_S)

    def busy_pids(self, role: str) -> list[int]:
        """Returns the process ids of the frontends of workers at which the gateway has open streams."""
        return [worker["pid"] for worker in self.busy(role)]

    def busy(self, role: str) -> list[dict[str, Any]]:
        busy = {load.address for load in self.loads().workers if load.streams}
        return [worker for worker in self.workers(role) if worker["address"] in busy]

    def tokens(self, task: str) -> float:
        """Returns the tokens of requests with this task so far."""
        return sum(totals.tokens for totals in self.loads().tasks if totals.task == task)


@dataclass(frozen=True)
class Machines(Running):
    cluster: Cluster


def body(seed: int, **fields: Any) -> dict[str, Any]:
    """Returns a request with penalties, min_tokens, logprobs and a stop string."""
    return {
        "prompt": prompts(KINDS[seed % len(KINDS)], 2)[0],
        "max_tokens": TOKENS,
        "min_tokens": TOKENS,
        "temperature": 0.8,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.05,
        "logprobs": 2,
        "stop": ["\x00never said"],
        "seed": seed,
        "speculation": {"mode": "fixed", "depth": 4},  # rounds even if the pace would not draft
        **fields,
    }


def stream(
    machines: Running, request: dict[str, Any], after: int = 0, then: Callable[[], None] = lambda: None
) -> Answer:
    """Reads a stream, and calls ``then`` after ``after`` chunks."""
    answer = Answer()
    fields = {**request, "stream": True, "stream_options": {"include_usage": True}}
    fields["speculation"] = {**request.get("speculation", {}), "report": True}
    url = f"{machines.http}/v1/completions"
    with httpx.stream("POST", url, json=fields, timeout=START_S) as response:
        assert response.status_code == 200, response.read().decode()
        chunks = 0
        started = last = time.monotonic()
        for line in response.iter_lines():
            if not line or line == "data: [DONE]":
                continue
            now = time.monotonic()
            answer.longest_pause_s, last = max(answer.longest_pause_s, now - last), now
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            answer.usage = event.get("usage") or answer.usage
            for choice in event["choices"]:
                answer.text += choice["text"]
                answer.logprobs += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
                answer.finish_reason = choice["finish_reason"] or answer.finish_reason
            chunks += 1
            if chunks == after:
                then()
                last = time.monotonic()
    answer.took_s = time.monotonic() - started
    return answer


def plain(machines: Machines, request: dict[str, Any]) -> Answer:
    return stream(machines, {**request, "speculation": {"mode": "off"}})


def agree(answer: Answer, expected: Answer) -> None:
    assert answer.text == expected.text
    assert answer.finish_reason == expected.finish_reason
    assert answer.usage["completion_tokens"] == expected.usage["completion_tokens"]
    assert len(answer.logprobs) == len(expected.logprobs) == expected.usage["completion_tokens"]
    assert all(
        math.isclose(a, b, abs_tol=1e-4) for a, b in zip(answer.logprobs, expected.logprobs, strict=True)
    )


def send(signal_number: int, pids: Callable[[], Any]) -> Callable[[], None]:
    def to_all() -> None:
        found = list(pids())
        assert found
        for pid in found:
            os.kill(pid, signal_number)

    return to_all


@contextmanager
def deployed(folder: Path, cluster: Cluster, application: Mapping[str, Any]) -> Iterator[Machines]:
    """Yields the service of a Serve config file with this application after it is ready."""
    http, grpc_port = free_port(), free_port()
    config = {
        "proxy_location": "EveryNode",
        "http_options": {"host": "127.0.0.1", "port": http},
        "grpc_options": {"port": grpc_port, "grpc_servicer_functions": ADD_SERVICERS},
        "applications": [dict(application)],
    }
    (folder / "serve.yaml").write_text(yaml.safe_dump(config))
    machines = Machines(f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc_port}", cluster)
    with serve_run(folder, ["serve.yaml"], cluster.address, {}, lambda _: machines.is_ready()):
        yield machines


def deploy_again(folder: Path, machines: Machines, described: list[dict[str, Any]]) -> None:
    """Deploys applications with the command of docs/rolling-out-a-draft.md."""
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "applications": described}))
    command = [str(Path(sys.executable).parent / "serve"), "run", "--non-blocking", file.name]
    environment = {**os.environ, "RAY_ADDRESS": machines.cluster.address}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=START_S, capture_output=True)
