"""``python -m cluster.drain``: ends a pod's work before it is stopped, as its preStop hook.

Serve learns that the node leaves. It starts replacements of this node's replicas elsewhere, sends no new
requests to this node's proxy, and lets both finish accepted requests. The hook returns when no replica and no
proxy of Serve is left here.
"""

import argparse
import subprocess
import sys
import time
from typing import Any

import ray
from ray.exceptions import RayError

ANSWER_S = 10.0  # timeout in seconds of an answer of Serve's controller
POLL_S = 1.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.drain", description="Drains a node of Ray.")
    parser.add_argument("--within", type=int, required=True, metavar="S", help="seconds until it is stopped")
    parser.add_argument("--node", metavar="ID", help="[the one that this runs on]")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.within
    ray.init(address="auto", namespace="serve", log_to_driver=False)
    node = options.node or ray.get_runtime_context().get_node_id()
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    # Ray offers this to its autoscaler and on the command line, but not in Python.
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--node-id", node]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the pod is being stopped"]
    subprocess.run([*command, "--deadline-remaining-seconds", str(options.within)], check=True)
    try:
        while here := _on(node, ray.get(controller.get_serve_instance_details.remote(), timeout=ANSWER_S)):
            if time.monotonic() > deadline:
                print(f"still here after {options.within} s: {', '.join(here)}", file=sys.stderr)
                return 1
            time.sleep(POLL_S)
    except RayError as error:  # the cluster itself shuts down, with all replicas
        print(f"Serve does not answer any more: {error}", file=sys.stderr)
        return 1
    return 0


def _on(node: str, details: dict[str, Any]) -> list[str]:
    """Returns Serve's replicas and proxy on the node. details: answer of Serve's controller."""
    replicas = [
        replica["replica_id"]
        for application in details["applications"].values()
        for deployment in application["deployments"].values()
        for replica in deployment["replicas"]
        if replica.get("node_id") == node  # a replica has no node while it is being placed
    ]
    return replicas + (["proxy"] if node in details["proxies"] else [])


if __name__ == "__main__":
    sys.exit(main())
