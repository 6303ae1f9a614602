"""What the manifests for a laptop deploy, deployed here: `serve run` of serve.yaml, a raylet for each pod."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.client.client import Client
from outrider.client.errors import AuthenticationError
from tests.k8s.overlays import built
from tests.k8s.pods_view import KEY, lay_out
from tests.support.machines import raylets
from tests.support.patience import LIMIT_S, START_S, wait_until
from tests.support.running import free_port, serve_run

pytestmark = pytest.mark.slow

DRAIN_S = int(START_S)
PODS = ("gateway", "target", "draft", "target")  # each is a node with the resource of its group
TOKENS = 300


@dataclass(frozen=True)
class Deployed:
    http: str  # base URL
    grpc: str  # host:port
    pods: list[tuple[str, str]]  # what each is for, its node id
    environment: dict[str, str]

    def workers(self) -> list[dict[str, Any]]:
        """Returns existing workers; none as long as the service does not answer."""
        try:
            answer = httpx.get(
                f"{self.http}/health", headers={"Authorization": f"Bearer {KEY}"}, timeout=LIMIT_S
            )
        except httpx.TransportError:
            return []
        return answer.json()["workers"] if answer.status_code in (200, 503) else []

    def node_of(self, role: str) -> str:
        (worker,) = (worker for worker in self.workers() if worker["role"] == role)
        return worker["node"]

    def client(self) -> Client:
        return Client(self.grpc, KEY)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder: Path = tmp_path_factory.mktemp("pod")
    http, grpc_port = free_port(), free_port()
    config = lay_out(built("cpu"), folder)
    config = config.replace("port: 8000", f"port: {http}").replace("port: 9000", f"port: {grpc_port}")
    (folder / "serve.yaml").write_text(config)
    variables = {
        "OUTRIDER_TOKEN": "of the workers in these tests",
        "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "1",  # a proxy stays half a minute otherwise
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        with raylets(num_cpus=0) as cluster:
            pods = [(pod, cluster.add_node(num_cpus=1, resources={pod: 1}).node_id) for pod in PODS]
            environment = {**os.environ, "RAY_ADDRESS": cluster.address}
            deployed = Deployed(f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc_port}", pods, environment)
            have_joined = lambda _: {w["role"] for w in deployed.workers()} == {"target", "draft"}  # noqa: E731
            with serve_run(folder, ["serve.yaml"], cluster.address, {}, have_joined):
                yield deployed


def test_http_and_grpc_answer_to_the_key(deployed: Deployed) -> None:
    body: dict[str, Any] = {"prompt": '{"name": "', "max_tokens": 24, "temperature": 0.7, "seed": 7}
    url = f"{deployed.http}/v1/completions"
    assert httpx.post(url, json=body, timeout=LIMIT_S).status_code == 401
    answer = httpx.post(url, json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=LIMIT_S).json()
    with deployed.client() as client:
        pieces = client.generate(body["prompt"], max_tokens=24, temperature=0.7, seed=7)
        assert "".join(piece.text for piece in pieces) == answer["choices"][0]["text"]
    with Client(deployed.grpc) as stranger, pytest.raises(AuthenticationError):
        list(stranger.generate(body["prompt"]))


def test_replicas_are_in_pods_of_their_group(deployed: Deployed) -> None:
    for role in ("target", "draft"):
        assert (role, deployed.node_of(role)) in deployed.pods


def test_pod_that_leaves_hands_its_target_over(deployed: Deployed) -> None:
    request: dict[str, Any] = {"max_tokens": TOKENS, "min_tokens": TOKENS, "temperature": 0.8, "seed": 3}
    with deployed.client() as client:
        undisturbed = "".join(piece.text for piece in client.generate("The ", **request))
        before = deployed.node_of("target")
        said, leaving = "", None
        for number, piece in enumerate(client.generate("The ", **request)):
            said += piece.text
            if number == 20:
                command = [sys.executable, "-m", "cluster.drain", f"--within={DRAIN_S}", f"--node={before}"]
                leaving = subprocess.Popen(command, env=deployed.environment)
        assert leaving is not None
        assert leaving.wait(DRAIN_S) == 0
    assert said == undisturbed
    wait_until(lambda: [w["role"] for w in deployed.workers()].count("target") == 1, START_S)
    assert deployed.node_of("target") != before
