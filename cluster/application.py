"""Serve application: gateway, target and draft, each in processes of their own."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import DeploymentActorConfig, RequestRouterConfig

from actors.worker import DraftWorker, TargetWorker, Worker
from cluster.access import (
    api_keys,
    check_access,
    joining_trust,
    receipt_key,
    report_environment,
    shared_trust,
)
from cluster.arguments import CONFIG, read_settings
from cluster.autoscaling import autoscaling
from cluster.groups import AutoscalingSettings, GatewayReplicas, WorkerSettings
from cluster.model_folders import check_folders
from cluster.preflight import Preflight
from cluster.settings import Settings, on_device
from cluster.settings_errors import SettingsError
from cluster.start import (
    check_models,
    check_placement,
    check_resources,
    rank_resources,
    start_ray,
    start_serve,
    warn_of_skipped_audits,
    warn_of_slow_drafts,
)
from cluster.stop import GATEWAY, MARGIN_S
from cluster.tenants import Tenancy, caller_settings, read_tenants
from cluster.tracing import start_tracing, tracing_environment
from gateway.api.access import who_is_answered
from gateway.deployment import Gateway, draft_deployment
from gateway.generation.answer_store import STORE, LocalAnswers
from gateway.tenants.shared_limits import LIMITS, AllLimits
from outrider.telemetry.debug_lines import show_debug_lines
from protos.trust import Trust

logger = logging.getLogger(f"ray.serve.{__name__}")

JOINS = "joins"
ROUTERS = {
    "least": RequestRouterConfig(),
    "session": RequestRouterConfig(
        request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
    ),
}


@dataclass(frozen=True)
class ServiceStart:
    """Inputs of a service's start: complete settings, and values from its environment."""

    settings: Settings
    keys: list[str]  # API keys, including the keys of tenants
    tenants: Mapping[str, Tenancy]
    trust: Trust
    tracing: Mapping[str, str]  # environment variables of tracing
    receipt_key: str | None  # PEM of the key that signs receipts


def app(arguments: dict[str, Any]) -> Application:
    """Builds the application of ``serve run cluster.app``; its arguments are the settings.

    Raises:
        SettingsError: a setting is not accepted, or the file of settings cannot be read.
        VocabularyMismatch: draft and target do not share a vocabulary.
        UnsupportedModelError: a model cannot be served, or not by this number of ranks.
        ValueError: another file cannot be read, the cluster lacks a requested resource, a device has too
            little memory, or required API keys are missing.
    """
    start = _prepared(arguments)
    start_serve(start.settings, start.keys[0] if start.keys else None)
    return _bound(start)


def service(config: str | None) -> Application:
    """Builds the application of ``serve build cluster.service``, which takes no arguments.

    A config file of Serve starts Serve itself, so only Ray is started here.

    Args:
        config: file or folder with the settings; None: the demo pair is served.

    Raises:
        Everything that ``app`` raises.
    """
    return _bound(_prepared({} if config is None else {CONFIG: config}))


def _prepared(arguments: Mapping[str, Any]) -> ServiceStart:
    """Reads and checks the inputs of the start, and starts Ray. Raises as ``app`` does."""
    show_debug_lines()
    settings = read_settings(arguments)
    # In a task of Ray, as for a config file of Serve, and not in `serve run` itself.
    is_elsewhere = ray.is_initialized() and ray.get_runtime_context().get_task_id() is not None
    logger.info(report_environment(is_elsewhere=is_elsewhere))
    trust, tracing, tenants = shared_trust(settings), tracing_environment(), read_tenants(settings)
    keys = [*api_keys(settings), *(key for tenant in tenants.values() for key in tenant.keys)]
    check_access(settings, keys, is_elsewhere=is_elsewhere)
    logger.info(who_is_answered(bool(keys), anonymous=settings.access.allow_anonymous))
    return ServiceStart(_checked(settings), keys, tenants, trust, tracing, receipt_key(settings))


def _bound(start: ServiceStart) -> Application:
    """Returns the application, with every deployment of the service."""
    settings, trust, tracing = start.settings, start.trust, start.tracing
    workers = [_target(settings, trust, tracing)]
    workers += [_draft(settings, name, trust, tracing) for name in settings.drafts]
    requests = settings.gateway
    # Calls, not decorators: a decorated class would be pickled by value, with its module's globals.
    gateway = serve.deployment(
        serve.ingress()(Gateway),
        name=GATEWAY,
        num_replicas=requests.replicas,
        # The gateway has its own queues: in Serve's queues, health checks would wait behind all requests.
        max_ongoing_requests=requests.most_at_once,
        ray_actor_options={"num_cpus": requests.cpus, "resources": requests.resources},
        request_router_config=ROUTERS[requests.router],
        deployment_actors=_shared_by_gateways(requests, start.tenants),
        graceful_shutdown_timeout_s=requests.request_deadline_s + MARGIN_S,
        user_config=settings.pace.model_dump(),
        logging_config={"enable_access_log": False},
    )
    return gateway.bind(
        settings.gateway_settings().model_copy(
            update={**caller_settings(start.keys, start.tenants), "receipt_key": start.receipt_key}
        ),
        trust,
        partial(start_tracing, tracing, "gateway"),
        workers,
        settings.pace,
    )


def draft(arguments: dict[str, Any]) -> Application:
    """Builds the application of ``import_path: cluster.draft``: a draft that joins a running service.

    Serve adds and removes it without a change of the running service. The application has the draft's name,
    by which gateways find it.

    Args:
        arguments: the settings of the service and of its new draft, which ``joins`` names.

    Raises:
        ValueError: the service's own token is missing.
        Everything that ``app`` raises.
    """
    settings = read_settings({name: value for name, value in arguments.items() if name != JOINS})
    if (name := arguments.get(JOINS)) not in settings.drafts:
        there = ", ".join(settings.drafts)
        raise SettingsError(f"{JOINS}={name!r} is no draft of these settings: one of {there} is")
    trust, tracing = joining_trust(settings), tracing_environment()
    return _draft(_checked(settings), name, trust, tracing)


def _shared_by_gateways(
    requests: GatewayReplicas, tenants: Mapping[str, Tenancy]
) -> list[DeploymentActorConfig]:
    """Returns actors that hold responses and limits for several gateways; a single gateway needs no actor."""

    def actor(name: str, kind: type, **given: Any) -> DeploymentActorConfig:
        return DeploymentActorConfig(
            name=name, actor_class=ray.remote(kind), init_kwargs=given, actor_options={"num_cpus": 0}
        )

    actors = []
    if requests.replicas != 1 and requests.stored_answer_bytes:
        actors.append(actor(STORE, LocalAnswers, most_bytes=requests.stored_answer_bytes))
    limited = {name: tenant.settings for name, tenant in tenants.items() if tenant.is_limited}
    if requests.replicas != 1 and limited:
        actors.append(actor(LIMITS, AllLimits, tenants=limited))
    return actors


def _checked(settings: Settings) -> Settings:
    """Starts Ray, checks that all workers fit, and returns complete settings. Raises as ``app`` does."""
    check_folders(settings)
    with Preflight() as preflight:
        start_ray(settings)
        settings = settings.with_gpus(ray.cluster_resources().get("GPU", 0.0))
        check_resources(settings)
        check_placement(settings)
        warn_of_slow_drafts(settings)
        warn_of_skipped_audits(settings)
        return check_models(settings, preflight)


def _target(settings: Settings, trust: Trust, tracing: Mapping[str, str]) -> Application:
    target = settings.target
    layout = _layout(target, settings.autoscaling)
    if target.tensor_parallel > 1:
        layout["placement_group_bundles"] = [rank_resources(target)] * target.tensor_parallel
        layout["placement_group_strategy"] = target.placement
    deployment = _deployment(TargetWorker, "target", layout)
    engine = on_device(settings.target_engine(), target.gpus or 0.0)
    has_receipts = settings.access.receipt_key_file is not None
    return deployment.bind(engine, trust, partial(start_tracing, tracing, "target"), has_receipts)


def _draft(settings: Settings, name: str, trust: Trust, tracing: Mapping[str, str]) -> Application:
    draft = settings.drafts[name]
    layout = _layout(draft, settings.autoscaling)
    deployment = _deployment(DraftWorker, draft_deployment(name), layout)
    engine = on_device(settings.draft_engine(name), draft.gpus or 0.0)
    return deployment.bind(engine, trust, partial(start_tracing, tracing, "draft"), name)


def _layout(worker: WorkerSettings, aims: AutoscalingSettings) -> dict[str, Any]:
    """Returns the number of a deployment's replicas, and the resources of each."""
    # Workers reserve no logical CPUs: a two-core machine would run out of them before its cores are busy.
    options: dict[str, Any] = {"num_cpus": 0, "num_gpus": worker.gpus, "resources": worker.resources}
    if worker.accelerator is not None:
        options["accelerator_type"] = worker.accelerator
    if worker.max_replicas is None:
        return {"ray_actor_options": options, "num_replicas": worker.replicas}
    return {"ray_actor_options": options, "autoscaling_config": autoscaling(worker, aims)}


def _deployment(worker: type[Worker], name: str, layout: dict[str, Any]) -> Deployment:
    """Returns a deployment with these replicas, whose router reads the table of workers."""
    logger.debug("deployment %s: %s", name, layout)
    return serve.deployment(
        worker,
        name=name,
        request_router_config=RequestRouterConfig(request_router_class="gateway.workers.router.TableRouter"),
        health_check_period_s=2,
        health_check_timeout_s=5,
        **layout,
    )
