"""Prints the service's address and a first request, once the service answers."""

import json
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from cluster.settings import Settings
from outrider.demo.written_out import TOLD

POLL_S = 0.5

NO_SECOND_TARGETS = (
    "second targets: rounding differs among the targets, so an answer stays at the target that has begun it"
)
FIRST_REQUEST = {"prompt": '{"name": "', "max_tokens": 60, "temperature": 0}


def announce_when_ready(settings: Settings, key: str | None, metrics_address: str) -> None:
    """Starts a thread that announces the service when it is ready: ``serve run`` blocks in Serve's code.

    Args:
        key: API key; None if no keys are needed.
        metrics_address: host:port of Ray's exporter.
    """
    arguments = settings, key, metrics_address
    threading.Thread(target=_announce, args=arguments, name="announce", daemon=True).start()


def _announce(settings: Settings, key: str | None, metrics_address: str) -> None:
    addresses = settings.addresses
    url = f"http://{addresses.http_host}:{addresses.http_port}"
    while (health := _health(f"{url}/health", key)) is None:
        time.sleep(POLL_S)
    print(announcement(settings, key, metrics_address, health), flush=True)


def announcement(settings: Settings, key: str | None, metrics_address: str, health: dict[str, Any]) -> str:
    """Returns the announcement: model, addresses, access and the promise of reproducible texts.

    Args:
        key: API key; None if no keys are needed.
        metrics_address: host:port of Ray's exporter.
        health: answer of GET /health with the key.
    """
    addresses = settings.addresses
    url = f"http://{addresses.http_host}:{addresses.http_port}"
    there = {worker["draft"] for worker in health["workers"]}
    port = addresses.direct_grpc_port
    direct = "" if port is None else f"           {addresses.http_host}:{port}, past Serve's proxy\n"
    of_demo = f"  target   {TOLD}\n" if settings.has_written_out_demo else ""
    authorization = "" if key is None else " -H 'Authorization: Bearer <your API key>'"
    targets = [worker for worker in health["workers"] if worker["role"] == "target"]
    promises = {worker["promise"]: None for worker in targets}
    may_move = settings.target.most_replicas == 1 or all(worker["is_exact"] for worker in targets)
    missing = [name for name in settings.drafts if name not in there]
    return (
        f"\nOutrider serves {settings.target.name}\n"
        f"{of_demo}"
        f"  HTTP     {url}/v1/completions\n"
        f"  gRPC     {addresses.http_host}:{addresses.grpc_port}, outrider.v1.Generation\n"
        f"{direct}"
        f"  page     {url}/\n"
        f"  metrics  http://{metrics_address}/metrics\n"
        f"  access   {health['access']}\n"
        + "".join(f"  promise  {promise}\n" for promise in promises)
        + ("" if may_move else f"  without  {NO_SECOND_TARGETS}\n")
        + "".join(f"  without  draft {name!r}, which has no worker yet\n" for name in missing)
        + "A first request:\n"
        f"  curl {url}/v1/completions{authorization} -H 'Content-Type: application/json' "
        f"-d '{json.dumps(FIRST_REQUEST)}'\n"
    )


def _health(url: str, key: str | None) -> dict[str, Any] | None:
    """Returns a gateway's health; None if no gateway is ready."""
    request = urllib.request.Request(url, headers={} if key is None else {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=1) as answer:
            health: dict[str, Any] = json.load(answer)
            return health
    except (urllib.error.URLError, OSError):
        return None
