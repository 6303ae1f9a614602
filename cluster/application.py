"""The Serve application: gateway, target and draft, each in processes of their own."""

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from actors.worker import DraftWorker, TargetWorker, Worker
from cluster.settings import Settings
from cluster.start import check_resources, start_serve
from engine.settings import EngineSettings
from engine.vocabulary import check_vocabulary
from gateway.deployment import Gateway


def app(settings: Settings) -> Application:
    """What ``serve run cluster.app`` builds; the arguments of the command line are the settings.

    Raises:
        VocabularyMismatch: draft and target do not share a vocabulary.
        ValueError: the cluster lacks a resource that was asked for.
    """
    settings = settings.resolved()
    if settings.target is not None and settings.draft is not None:
        check_vocabulary(settings.target, settings.draft)
    start_serve(settings)
    check_resources(settings)
    workers = [_target(settings)]
    if settings.draft is not None:
        workers.append(_draft(settings))
    # Calls, not decorators: a decorated class would be pickled by value, its module's globals copied.
    gateway = serve.deployment(
        serve.ingress()(Gateway),
        name="Gateway",
        num_replicas=settings.gateways,
        max_ongoing_requests=settings.max_requests,
        ray_actor_options={"num_cpus": 0},
        logging_config={"enable_access_log": False},
    )
    return gateway.bind(settings.gateway(), workers)


def _target(settings: Settings) -> Application:
    resources = {"num_gpus": settings.target_gpus, "resources": settings.target_resources}
    return _worker(TargetWorker, settings.target_engine(), settings.targets, resources)


def _draft(settings: Settings) -> Application:
    resources = {"num_gpus": settings.draft_gpus, "resources": settings.draft_resources}
    return _worker(DraftWorker, settings.draft_engine(), settings.drafts, resources)


def _worker(
    worker: type[Worker], engine: EngineSettings, replicas: int, resources: dict[str, Any]
) -> Application:
    deployment = serve.deployment(
        worker,
        name=worker.__name__,
        num_replicas=replicas,
        # Logical CPUs run out before real ones do: without them a two-core machine never waits.
        ray_actor_options={"num_cpus": 0, **resources},
        request_router_config=RequestRouterConfig(request_router_class="gateway.router.TableRouter"),
        health_check_period_s=2,
    )
    return deployment.bind(engine)
