"""Processes killed, stopped and slowed down under running streams: nobody notices.

Two raylets, as on two machines: gateway and targets on one, the draft on the other. Every stream has
penalties, min_tokens, logprobs and a stop string on.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import psutil  # type: ignore[import-untyped]
import pytest

from outrider.client.client import Client
from outrider.demo.prompts import KINDS, prompts
from protos import generation_pb2, generation_pb2_grpc
from tests.support.machines import TOKENS, Machines, agree, body, deployed, plain, raylets, send, stream
from tests.support.patience import LIMIT_S, START_S, wait_until
from tests.support.served import SERVED

KEEPALIVE_S = 2.0  # after which a silent worker counts as lost
MAX_REQUESTS, MAX_WAITING = 12, 4
TOKEN = "of the workers in these tests"
SETTINGS = {
    "target.replicas": 2,
    "gateway.resources": {"target_side": 1},
    "target.resources": {"target_side": 1},
    "drafts.default.resources": {"draft_side": 1},
    "gateway.max_requests": MAX_REQUESTS,
    "gateway.max_waiting": MAX_WAITING,
}


@dataclass(frozen=True)
class TwoMachines(Machines):
    draft_node: Any


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoMachines]:
    with pytest.MonkeyPatch.context() as patch, raylets(num_cpus=4, resources={"target_side": 8}) as cluster:
        patch.setenv("OUTRIDER_TOKEN", TOKEN)  # workers and gateways of later deployments share it
        draft_node = cluster.add_node(num_cpus=1, resources={"draft_side": 8})
        with deployed(tmp_path_factory.mktemp("machines"), cluster, application({})) as found:
            machines = TwoMachines(found.http, found.grpc, cluster, draft_node)
            machines.wait_for("target", 2)
            machines.wait_for("draft", 1)
            yield machines


@pytest.mark.slow  # a rank that is killed takes its target along too: tests/cluster/test_tensor_parallel.py
def test_a_target_killed_under_a_stream(machines: Machines) -> None:
    request = body(1)
    expected = plain(machines, request)
    kill = send(signal.SIGKILL, lambda: machines.busy_pids("target"))
    answer = stream(machines, request, after=3, then=kill)
    agree(answer, expected)
    assert answer.usage["speculation"]["lost_targets"] == 1
    machines.wait_for("target", 2)


def test_all_targets_killed_under_a_plain_stream(machines: Machines) -> None:
    request = body(1)
    expected = plain(machines, request)
    kill = send(signal.SIGKILL, lambda: machines.pids("target"))
    answer = stream(machines, {**request, "speculation": {"mode": "off"}}, after=3, then=kill)
    agree(answer, expected)
    machines.wait_for("target", 2)


def test_a_draft_killed_under_a_stream(machines: Machines) -> None:
    request = body(2)
    expected = plain(machines, request)
    answer = stream(machines, request, after=3, then=send(signal.SIGKILL, lambda: machines.pids("draft")))
    agree(answer, expected)
    assert answer.usage["speculation"]["lost_drafts"] >= 1
    machines.wait_for("draft", 1)
    again = stream(machines, body(3))
    assert again.usage["speculation"]["accepted"] > 0


@contextlib.contextmanager
def resumed(pids: list[int]) -> Iterator[None]:
    """Whatever was stopped goes on afterwards."""
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("role", ["target", pytest.param("draft", marks=pytest.mark.slow)])
def test_a_worker_that_hangs_under_a_stream(machines: Machines, role: str) -> None:
    request = body(4)
    expected = plain(machines, request)
    stopped: list[int] = []

    def stop() -> None:
        stopped.extend(machines.busy_pids(role))
        assert stopped
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)

    with resumed(stopped):
        answer = stream(machines, request, after=3, then=stop)
    agree(answer, expected)
    assert answer.longest_pause_s < 3 * KEEPALIVE_S + expected.took_s
    machines.wait_for("target", 2)
    machines.wait_for("draft", 1)


@contextlib.contextmanager
def slowed(pids: set[int], share: float = 0.9, period_s: float = 0.05) -> Iterator[None]:
    """The processes run for only the rest of every period."""
    ends = threading.Event()

    def run() -> None:
        while not ends.is_set():
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            ends.wait(share * period_s)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            time.sleep((1 - share) * period_s)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_worker_that_is_ten_times_slower(machines: Machines, role: str) -> None:
    request = body(5, max_tokens=60, min_tokens=60)
    expected = plain(machines, request)
    with slowed(machines.pids(role)):
        agree(stream(machines, request), expected)


def test_what_a_client_leaves_behind_is_freed(machines: Machines) -> None:
    fields = {**body(6, prompt="x", max_tokens=1500, min_tokens=1500), "stream": True, "task": "left"}
    with httpx.stream("POST", f"{machines.http}/v1/completions", json=fields, timeout=LIMIT_S) as response:
        assert response.status_code == 200
        lines = response.iter_lines()  # dropping it would close the stream
        next(lines)
        assert machines.busy_pids("target")
    wait_until(lambda: not machines.busy_pids("target") and not machines.busy_pids("draft"))
    assert machines.tokens("left") < 1000  # of 1500: it was not at its end anyway


def test_too_many_requests_are_told_to_come_again_and_no_accepted_one_is_lost(machines: Machines) -> None:
    url = f"{machines.http}/v1/completions"

    def ask(seed: int) -> httpx.Response:
        return httpx.post(url, json=body(seed, max_tokens=80, min_tokens=80), timeout=START_S)

    count = 3 * (MAX_REQUESTS + MAX_WAITING)
    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(ask, range(count)))
    by_status = {status: [a for a in answers if a.status_code == status] for status in (200, 429)}
    assert len(by_status[200]) + len(by_status[429]) == count
    assert len(by_status[200]) >= MAX_REQUESTS
    assert by_status[429]
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in by_status[429])
    assert all(answer.json()["usage"]["completion_tokens"] == 80 for answer in by_status[200])


CANCELLED_AFTER = [1, 1, 2, 3, 10] * 6


def test_a_deadline_and_every_cancellation_reach_the_workers(machines: Machines) -> None:
    request = generation_pb2.GenerateRequest(
        text="x", task="cancelled", sampling=generation_pb2.Sampling(max_tokens=1500, min_tokens=1500)
    )
    with grpc.insecure_channel(machines.grpc) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        with pytest.raises(grpc.RpcError) as late:
            list(stub.Generate(request, timeout=0.5))
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        for tokens in CANCELLED_AFTER:
            call = stub.Generate(request, timeout=LIMIT_S)
            for _ in range(tokens):
                next(call)
            assert machines.busy_pids("target")
            call.cancel()
            wait_until(lambda: not machines.busy_pids("target"))
    assert machines.tokens("cancelled") < 1000 * len(CANCELLED_AFTER)  # none was at its end anyway


def gateways(machines: Machines) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["name", "cmdline"]):
        names = [process.info["name"] or "", *(process.info["cmdline"] or [])[:1]]
        if any("ServeReplica:default:gateway" in name for name in names):
            found.append(process)
    return found


def test_a_gateway_killed_under_a_stream_of_our_client(machines: Machines) -> None:
    with Client(machines.grpc, patience_s=START_S) as client:
        settings: dict[str, Any] = {"max_tokens": TOKENS, "min_tokens": TOKENS, "temperature": 0.8, "seed": 8}
        expected = "".join(piece.text for piece in client.generate("def add(", **settings))
        answer = client.generate("def add(", **settings)
        pieces = []
        for number, piece in enumerate(answer):
            pieces.append(piece)
            if number == 20:
                for gateway in gateways(machines):
                    gateway.kill()
    assert "".join(piece.text for piece in pieces) == expected
    assert answer.repeats >= 1
    until_a_gateway_knows_its_workers(machines)


def until_a_gateway_knows_its_workers(machines: Machines) -> None:
    """A new gateway hears of them anew; Serve's proxy may know only the one that was lost."""

    def knows() -> bool:
        try:
            return len(machines.pids("target")) == 2 and len(machines.pids("draft")) == 1
        except (httpx.TransportError, KeyError, ValueError):
            return False

    wait_until(knows, START_S)


@pytest.mark.slow  # as with our client
def test_a_gateway_killed_under_the_example_of_the_docs(machines: Machines) -> None:
    page = Path(__file__).parents[2].joinpath("docs", "failures.md").read_text()
    [example] = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "def pieces(" in block]
    namespace: dict[str, Any] = {}
    exec(example, namespace)
    settings = {"max_tokens": TOKENS, "temperature": 0.8, "extra_body": {"min_tokens": TOKENS}, "seed": 9}
    with openai.OpenAI(base_url=f"{machines.http}/v1", api_key="none", max_retries=0) as client:
        expected = "".join(namespace["pieces"](client, "def add(", **settings))
        text = ""
        for number, piece in enumerate(namespace["pieces"](client, "def add(", **settings)):
            text += piece
            if number == 20:
                for gateway in gateways(machines):
                    gateway.kill()
    assert text == expected
    until_a_gateway_knows_its_workers(machines)


MODES: dict[str, dict[str, Any]] = {
    "off": {"mode": "off"},
    "auto": {"mode": "auto"},
    "fixed": {"mode": "fixed", "depth": 4},
    "n-gram": {"mode": "fixed", "depth": 4, "drafter": "ngram"},
}


def texts(machines: Machines, speculation: dict[str, Any], count: int) -> list[str]:
    """Of requests with mixed prompts, temperatures and seeds, several at a time."""

    def ask(number: int) -> str:
        request = {
            "prompt": prompts(KINDS[number % len(KINDS)], 48)[number % 48],
            "max_tokens": 32,
            "temperature": (0.0, 0.7, 1.0, 1.3)[number % 4],
            "top_p": (1.0, 0.9)[number % 2],
            "seed": number,
            "speculation": speculation,
        }
        response = httpx.post(f"{machines.http}/v1/completions", json=request, timeout=START_S)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(MAX_REQUESTS // 2) as pool:
        return list(pool.map(ask, range(count)))


def gateway_pids(machines: Machines) -> set[int]:
    return {
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "ServeReplica:default:gateway" in " ".join(process.info["cmdline"] or [])
    }


def application(pace: dict[str, Any]) -> dict[str, Any]:
    """Of a config file, where the gateway's user_config is ``pace``."""
    return {
        "name": "default",
        "import_path": "cluster:app",
        "args": {**SETTINGS, **SERVED},
        "deployments": [{"name": "gateway", "user_config": pace}],
    }


@contextlib.contextmanager
def redeploying(machines: Machines) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that deploys as `serve deploy` does, with a config file that differs in the pace alone."""
    script = """
import json, ray, sys
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
ray.init(namespace="serve")
client = _get_global_client()
print("connected", flush=True)
for line in sys.stdin:
    client.deploy_apps(ServeDeploySchema(applications=[json.loads(line)]), _blocking=True)
    print("deployed", flush=True)
"""
    environment = {**os.environ, "RAY_ADDRESS": machines.cluster.address}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as process:
        assert process.stdout is not None
        said = iter(process.stdout)
        assert "connected\n" in said

        def deploy(pace: dict[str, Any]) -> None:
            print(json.dumps(application(pace)), file=process.stdin, flush=True)
            assert "deployed\n" in said

        yield deploy


@contextlib.contextmanager
def killed_every(seconds: float, pids: Callable[[], set[int]]) -> Iterator[list[int]]:
    killed: list[int] = []
    ends = threading.Event()

    def run() -> None:
        while not ends.wait(seconds):
            for pid in pids() - set(killed):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield killed
    finally:
        ends.set()
        thread.join()


@pytest.mark.slow
def test_three_hundred_requests_say_the_same_however_they_are_drafted(machines: Machines) -> None:
    """A difference would have to be a near-tie; none is expected in float32."""
    expected = texts(machines, MODES["off"], 300)
    for name in ("auto", "fixed", "n-gram"):
        assert texts(machines, MODES[name], 300) == expected, name
    with killed_every(4.0, lambda: machines.pids("draft")) as killed:
        assert texts(machines, MODES["auto"], 300) == expected
        machines.wait_for("draft", 1)
        assert texts(machines, MODES["fixed"], 300) == expected
    assert killed
    machines.wait_for("draft", 1)


@pytest.mark.slow  # two deployments by Serve; a gateway's part of it: tests/gateway/test_deployment.py
def test_the_pace_changes_at_run_time_and_nothing_restarts(machines: Machines) -> None:
    """Serve's user_config in a config file that is deployed again: the stream under way takes it up."""
    always = {"policy": "thresholds", "off_below": 0.0, "on_above": 0.0}
    machines.wait_for("target", 2)
    machines.wait_for("draft", 1)
    fields = {**body(12), "speculation": {"mode": "auto"}}
    processes = {role: machines.pids(role) for role in ("target", "draft")}
    gateways = gateway_pids(machines)
    with redeploying(machines) as redeploy:
        redeploy(always)
        before = stream(machines, fields)
        with slowed(processes["target"]):  # it is not at its end when the change comes
            during = stream(machines, fields, after=3, then=lambda: redeploy({**always, "off_from": 0}))
        after = stream(machines, fields)
        redeploy({})
    assert before.usage["speculation"]["rounds"] > during.usage["speculation"]["rounds"] > 0
    assert after.usage["speculation"]["rounds"] == 0
    assert before.text == during.text == after.text
    assert gateway_pids(machines) == gateways
    assert {role: machines.pids(role) for role in processes} == processes


def test_the_controller_killed_under_a_stream(machines: Machines) -> None:
    request = body(9)
    expected = plain(machines, request)
    controllers = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "ray::ServeController" in " ".join(process.info["cmdline"] or [])
    ]
    answer = stream(machines, request, after=3, then=send(signal.SIGKILL, lambda: controllers))
    agree(answer, expected)


@pytest.mark.slow  # Ray takes half a minute to notice
def test_the_draft_s_machine_lost_under_a_stream(machines: TwoMachines) -> None:
    """The last test here: nothing brings that machine back."""
    request = body(10)
    expected = plain(machines, request)
    lose = lambda: machines.cluster.remove_node(machines.draft_node, allow_graceful=False)  # noqa: E731
    with slowed(machines.pids("target")):  # it is not at its end before the machine is gone
        answer = stream(machines, request, after=3, then=lose)
    agree(answer, expected)
    assert answer.usage["speculation"]["lost_drafts"] >= 1
    wait_until(lambda: not machines.workers("draft"), START_S)
    assert stream(machines, body(11)).usage["speculation"]["lost_drafts"] == 1
