"""The Serve application: gateway, target and draft, each in processes of their own."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from actors.worker import DraftWorker, TargetWorker, Worker
from cluster.access import api_keys, check_access, shared_trust
from cluster.autoscaling import autoscaling
from cluster.preflight import Preflight
from cluster.settings import Settings
from cluster.start import (
    check_models,
    check_placement,
    check_resources,
    rank_resources,
    start_ray,
    start_serve,
)
from cluster.tracing import start_tracing, tracing_environment
from gateway.api.access import digest
from gateway.deployment import Gateway
from outrider.engine.settings import EngineSettings
from protos.trust import Trust

SPARE_REQUESTS = 64  # at a time beyond those that generate: health, models, refusals


def app(settings: Settings) -> Application:
    """What ``serve run cluster.app`` builds; the arguments of the command line are the settings.

    Raises:
        VocabularyMismatch: draft and target do not share a vocabulary.
        UnsupportedModelError: a model cannot be served, or not by so many ranks.
        ValueError: a file cannot be read, the cluster lacks a resource that was asked for, a device has too
            little memory, or other machines could ask without an API key.
    """
    settings = settings.resolved()
    keys, trust, tracing = api_keys(settings), shared_trust(settings), tracing_environment()
    check_access(settings, keys)
    with Preflight() as preflight:
        start_ray(settings)
        settings = settings.with_gpus(ray.cluster_resources().get("GPU", 0.0))
        check_resources(settings)
        check_placement(settings)
        settings = check_models(settings, preflight)
    start_serve(settings, keys[0] if keys else None)
    workers = [_target(settings, trust, tracing)]
    if settings.draft is not None:
        workers.append(_draft(settings, trust, tracing))
    # Calls, not decorators: a decorated class would be pickled by value, its module's globals copied.
    gateway = serve.deployment(
        serve.ingress()(Gateway),
        name="Gateway",
        num_replicas=settings.gateways,
        # The gateway's own queue decides; Serve's would answer without saying when to come again.
        max_ongoing_requests=settings.max_requests + settings.max_waiting + SPARE_REQUESTS,
        ray_actor_options={"num_cpus": 0, "resources": settings.gateway_resources},
        user_config=settings.pace.model_dump(),
        logging_config={"enable_access_log": False},
    )
    digests = tuple(digest(key) for key in keys)
    return gateway.bind(
        settings.gateway().model_copy(update={"api_key_digests": digests}),
        trust,
        partial(start_tracing, tracing, "gateway"),
        workers,
    )


def _target(settings: Settings, trust: Trust, tracing: Mapping[str, str]) -> Application:
    options = _actor_options(settings.target_gpus, settings.target_accelerator, settings.target_resources)
    placement: dict[str, Any] = {}
    if settings.tensor_parallel > 1:
        bundles = [rank_resources(settings)] * settings.tensor_parallel
        placement = {
            "placement_group_bundles": bundles,
            "placement_group_strategy": settings.target_placement,
        }
    aims = settings.sequences_per_target, settings.cache_in_use
    scaling = _scaling(settings, settings.targets, settings.max_targets, aims)
    layout = {**scaling, **placement}
    return _worker(TargetWorker, settings.target_engine(), trust, tracing, options, layout)


def _draft(settings: Settings, trust: Trust, tracing: Mapping[str, str]) -> Application:
    options = _actor_options(settings.draft_gpus, settings.draft_accelerator, settings.draft_resources)
    aims = settings.sequences_per_draft, settings.cache_in_use
    scaling = _scaling(settings, settings.drafts, settings.max_drafts, aims)
    return _worker(DraftWorker, settings.draft_engine(), trust, tracing, options, scaling)


def _scaling(settings: Settings, replicas: int, most: int | None, aims: tuple[int, float]) -> dict[str, Any]:
    """Of a deployment; aims: sequences and share of the cache in use, per replica."""
    if most is None:
        return {"num_replicas": replicas}
    delays = settings.scale_up_delay_s, settings.scale_down_delay_s
    return {"autoscaling_config": autoscaling(replicas, most, *aims, *delays)}


def _actor_options(
    gpus: float | None, accelerator: str | None, resources: dict[str, float]
) -> dict[str, Any]:
    # Logical CPUs run out before real ones do: without them a two-core machine never waits.
    options = {"num_cpus": 0, "num_gpus": gpus, "resources": resources}
    return options if accelerator is None else {**options, "accelerator_type": accelerator}


def _worker(
    worker: type[Worker],
    engine: EngineSettings,
    trust: Trust,
    tracing: Mapping[str, str],
    options: dict[str, Any],
    layout: dict[str, Any],
) -> Application:
    deployment = serve.deployment(
        worker,
        name=worker.__name__,
        ray_actor_options=options,
        request_router_config=RequestRouterConfig(request_router_class="gateway.workers.router.TableRouter"),
        health_check_period_s=2,
        health_check_timeout_s=5,
        **layout,
    )
    return deployment.bind(engine, trust, partial(start_tracing, tracing, worker.role))
