"""The pace changes while the service runs."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.machines import Machines, body, stream
from tests.support.two_machines import application, gateways, slowed


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


@pytest.mark.slow  # two deployments by Serve; a gateway's part of it: tests/gateway/test_deployment.py
def test_pace_changes_at_run_time_and_nothing_restarts(machines: Machines) -> None:
    """Serve's user_config in a config file that is deployed again: the stream under way takes it up."""
    always = {"policy": "thresholds", "off_below": 0.0, "on_above": 0.0}
    machines.wait_for("target", 2)
    machines.wait_for("draft", 1)
    fields = {**body(12), "speculation": {"mode": "auto"}}
    processes = {role: machines.pids(role) for role in ("target", "draft")}
    gateway_pids = {process.pid for process in gateways()}
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
    assert {process.pid for process in gateways()} == gateway_pids
    assert {role: machines.pids(role) for role in processes} == processes
