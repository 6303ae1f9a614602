"""Says where the service listens, and what to ask it first, once it answers."""

import json
import threading
import time
import urllib.error
import urllib.request

from cluster.settings import Settings

POLL_S = 0.5

FIRST_REQUEST = {"prompt": '{"name": "', "max_tokens": 60, "temperature": 0}


def announce_when_ready(settings: Settings, key: str | None, metrics_address: str) -> None:
    """Returns at once. ``serve run`` blocks in code that is not ours, so a thread has to wait for it.

    Args:
        key: an API key, where they are needed.
        metrics_address: host:port of Ray's exporter.
    """
    arguments = settings, key, metrics_address
    threading.Thread(target=_announce, args=arguments, name="announce", daemon=True).start()


def _announce(settings: Settings, key: str | None, metrics_address: str) -> None:
    addresses = settings.addresses
    url = f"http://{addresses.http_host}:{addresses.http_port}"
    expected = {"", *settings.drafts}
    while not expected <= _ready(f"{url}/health", key):
        time.sleep(POLL_S)
    port = addresses.direct_grpc_port
    direct = "" if port is None else f"           {addresses.http_host}:{port}, past Serve's proxy\n"
    authorization = "" if key is None else " -H 'Authorization: Bearer <your API key>'"
    print(
        f"\nOutrider serves {settings.target.name}\n"
        f"  HTTP     {url}/v1/completions\n"
        f"  gRPC     {addresses.http_host}:{addresses.grpc_port}, outrider.v1.Generation\n"
        f"{direct}"
        f"  page     {url}/\n"
        f"  metrics  http://{metrics_address}/metrics\n"
        "A first request:\n"
        f"  curl {url}/v1/completions{authorization} -H 'Content-Type: application/json' "
        f"-d '{json.dumps(FIRST_REQUEST)}'\n",
        flush=True,
    )


def _ready(url: str, key: str | None) -> set[str]:
    """Drafts of which a worker has joined; an empty name is the target's."""
    request = urllib.request.Request(url, headers={} if key is None else {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=1) as answer:
            return {worker["draft"] for worker in json.load(answer)["workers"]}
    except (urllib.error.URLError, OSError):
        return set()
