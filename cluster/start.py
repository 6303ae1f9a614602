"""Starts Ray and Serve for the application, or uses a running Ray and Serve."""

import errno
import logging
import os
import socket
import threading
import time

import ray
from ray import serve
from ray.serve.config import ProxyLocation

from cluster.gpus import ask_nodes
from cluster.groups import TargetSettings, WorkerSettings
from cluster.preflight import Preflight
from cluster.settings import Settings
from cluster.startup_banner import announce_when_ready
from cluster.stop import stop_in_order

logger = logging.getLogger(f"ray.serve.{__name__}")

SLIVER = 0.001  # amount of a resource that is requested for its presence alone
POLL_S = 0.5

ADD_SERVICERS = [
    "gateway.api.proxy.add_generation_servicer",
    "gateway.api.proxy.add_health_servicer",
]


def start_ray(settings: Settings) -> None:
    """Joins the cluster, or starts a cluster on this machine.

    Raises:
        ValueError: another program has a port that the service needs.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", str(settings.gateway.max_message_bytes))
    # Ray's default niceness of 15 gives a worker a thirtieth of another process's CPU time. So a start would
    # take minutes on a busy machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # seconds; Serve restarts a proxy that is not ready after three of these timeouts
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    # gRPC carries chunks from the gateway to the proxy in half the time of Ray's own streams. Only a Ray that
    # starts here uses it: between nodes such a connection would not notice a loss.
    os.environ.setdefault("RAY_SERVE_PROXY_USE_GRPC", "1")
    os.environ.setdefault("RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", "-1")  # the gateway bounds requests
    if not ray.is_initialized():
        _check_free("ray.metrics_port", "", settings.ray.metrics_port)
        ray.init(namespace="serve", include_dashboard=False, _metrics_export_port=settings.ray.metrics_port)
        if threading.current_thread() is threading.main_thread():
            stop_in_order(settings.gateway.stop_within_s)
    if not _serve_is_running():  # a running Serve holds the ports itself
        addresses = settings.addresses
        _check_free("addresses.http_port", addresses.http_host, addresses.http_port)
        _check_free("addresses.grpc_port", "", addresses.grpc_port)
        _check_free("addresses.direct_grpc_port", addresses.http_host, addresses.direct_grpc_port)


def start_serve(settings: Settings, key: str | None) -> None:
    """Starts Serve with a gRPC proxy, which ``serve run`` would not open.

    key: API key to ask the service whether it is ready; None if no keys are needed.
    """
    if _serve_is_running():
        logger.warning(
            "Serve runs already: http_host, http_port and grpc_port have no effect. Without gRPC: "
            "serve start --grpc-servicer-functions %s, or grpc_options in the config file.",
            " --grpc-servicer-functions ".join(ADD_SERVICERS),
        )
        return
    serve.start(
        proxy_location=ProxyLocation.EveryNode,
        http_options={"host": settings.addresses.http_host, "port": settings.addresses.http_port},
        grpc_options={"port": settings.addresses.grpc_port, "grpc_servicer_functions": ADD_SERVICERS},
    )
    node = next(node for node in ray.nodes() if node["Alive"])
    metrics_address = f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
    announce_when_ready(settings, key, metrics_address)


def check_resources(settings: Settings) -> None:
    """Raises ValueError naming a resource that the cluster lacks, for which Serve would wait forever."""
    deadline = time.monotonic() + settings.ray.nodes_join_within_s
    while lack := _lack(settings, ray.cluster_resources()):
        if time.monotonic() >= deadline:
            raise ValueError(lack)
        time.sleep(POLL_S)


def _lack(settings: Settings, there: dict[str, float]) -> str | None:
    """Returns a message about a resource that the cluster lacks; None if nothing is lacking."""
    gateway, target = settings.gateway, settings.target
    assert gateway.replicas is not None  # settings with GPUs have a number
    asked = [(gateway.replicas, {"CPU": gateway.cpus, **gateway.resources})]
    asked.append((target.replicas * target.tensor_parallel, _resources(target)))
    asked += [(draft.replicas, _resources(draft)) for draft in settings.drafts.values()]
    for name in sorted({name for _, resources in asked for name in resources}):
        needed = sum(replicas * resources.get(name, 0.0) for replicas, resources in asked)
        if needed > there.get(name, 0.0):
            return (
                f"the replicas need {needed:g} of resource {name!r}, the cluster has {there.get(name, 0.0):g}"
            )
    return None


def check_placement(settings: Settings) -> None:
    """Raises ValueError if the nodes have no room for the target's ranks under its placement."""
    ranks, placement = settings.target.tensor_parallel, settings.target.placement
    if ranks == 1:
        return
    needed = rank_resources(settings.target)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = [min(int(node.get(name, 0.0) / count) for name, count in needed.items()) for node in nodes]
    if placement == "STRICT_PACK" and max(room) < ranks:
        raise ValueError(
            f"target.placement='STRICT_PACK' puts {ranks} ranks with {needed} each on one node, which has "
            f"room for {max(room)}; PACK would use several"
        )
    if placement == "STRICT_SPREAD" and sum(map(bool, room)) < ranks:
        raise ValueError(
            f"target.placement='STRICT_SPREAD' puts {ranks} ranks with {needed} each on nodes of their own; "
            f"{sum(map(bool, room))} have room for one; SPREAD would share nodes"
        )


def warn_of_slow_drafts(settings: Settings) -> None:
    """Logs drafts that are on a CPU while their target is on GPUs."""
    for name, draft in settings.drafts.items():
        if settings.target.gpus and not draft.gpus:
            logger.warning(
                "drafts.%s.gpus=0 puts the draft on a CPU, where its step takes longer than one of the target"
                " on a GPU: it will hardly ever draft. drafts.%s.gpus=1 gives it a GPU; target.gpus=0.9 and"
                " drafts.%s.gpus=0.1 share one",
                name,
                name,
                name,
            )


def warn_of_skipped_audits(settings: Settings) -> None:
    """Logs audits that no replica can make."""
    audit, replicas = settings.gateway.audit, settings.target.most_replicas
    if audit is not None and audit.fraction and replicas == 1:
        logger.warning(
            "gateway.audit.fraction=%g with one replica of the target: every audit is skipped, as another"
            " replica makes it. target.replicas=2 gives it one",
            audit.fraction,
        )


def rank_resources(target: TargetSettings) -> dict[str, float]:
    """Returns the resources that Ray reserves for one rank; never empty."""
    return {name: count for name, count in _resources(target).items() if count} or {"CPU": SLIVER}


def check_models(settings: Settings, preflight: Preflight) -> Settings:
    """Checks models and prints the load of each device; returns settings with filled-in cache sizes.

    Raises:
        ValueError: a part does not fit; the message names a value that would fit.
        EngineError: a model cannot be served.
    """
    here = sum(node["Alive"] for node in ray.nodes()) == 1
    found = preflight.find(settings, here=here, asked=ask_nodes(settings))
    if found.table is not None:
        print(f"\n{found.table}\n", flush=True)
    if found.refusal is not None:
        raise found.refusal
    if found.table is None:
        logger.warning(
            "The devices' memory is not known here, so it is not planned: "
            "name the accelerator of target and draft (A100-40G or A100-80G, as an A100 may be either), "
            "or see `outrider plan --memory`"
        )
    return found.settings


def _resources(worker: WorkerSettings) -> dict[str, float]:
    # Ray turns an accelerator type into a sliver of a resource that its nodes have.
    of_type = {} if worker.accelerator is None else {f"accelerator_type:{worker.accelerator}": SLIVER}
    return {"GPU": worker.gpus or 0.0, **of_type, **worker.resources}


def _check_free(setting: str, host: str, port: int | None) -> None:
    """Raises ValueError if a port of this machine is taken: a later error would be harder to understand.

    host: address to listen on; empty: all addresses.
    """
    if port is None:
        return
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ValueError(
                    f"{setting}={port} is taken by another program, which may be another service of Outrider:"
                    " give a free port"
                ) from error


def _serve_is_running() -> bool:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {"name": "SERVE_CONTROLLER_ACTOR", "namespace": "serve"} in actors
