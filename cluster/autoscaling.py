"""Number of replicas of a worker. Serve's controller runs this module, so its imports are light."""

import math
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from actors.metrics import CACHE_IN_USE, FIRST_TOKEN, SEQUENCES
from cluster.groups import AutoscalingSettings, TargetSettings, WorkerSettings

LOOK_BACK_S = 15.0  # seconds over which a replica's reports are averaged; Serve gets a report every 10 s
ROUNDING = 1e-6  # replicas; a rounded average must not add a replica


class LoadPolicy:
    """Policy with enough replicas to keep the mean sequences and blocks of a replica below its aims."""

    def __init__(self, sequences: int, cache_in_use: float) -> None:
        """Sets the aims per replica: open sequences, and share of the blocks in use."""
        self._aims = {SEQUENCES: float(sequences), CACHE_IN_USE: cache_in_use}

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Returns the wanted number of replicas, which Serve delays and limits, and an empty state."""
        reported = context.aggregated_metrics or {}
        if not any(reported.get(name) for name in self._aims):
            return context.target_num_replicas, {}  # no replica has reported yet
        wanted = (sum(reported.get(name, {}).values()) / aim for name, aim in self._aims.items())
        return max(1, math.ceil(max(wanted) - ROUNDING)), {}


class FirstTokenPolicy:
    """Policy that adds a replica while first tokens are late, and removes a replica that is not needed.

    A policy gets reports from its own deployment's replicas only. So gateways tell a target how long a
    request waited in their queue, and the target's time to first token includes this wait.
    """

    def __init__(self, ttft_target_s: float, sequences: int, cache_in_use: float) -> None:
        """Sets the aim in seconds, and the aims of LoadPolicy, which decide if fewer replicas suffice."""
        self._target_s = ttft_target_s
        self._by_load = LoadPolicy(sequences, cache_in_use)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Returns the wanted number of replicas, which Serve delays and limits, and an empty state."""
        there = context.target_num_replicas
        reported = (context.aggregated_metrics or {}).get(FIRST_TOKEN)
        if not reported or context.current_num_replicas < there:
            return there, {}  # no replica has reported, or some are still starting
        if max(reported.values()) > self._target_s:
            return there + 1, {}
        enough, _ = self._by_load(context)
        return max(enough, there - 1) if enough < there else there, {}


def autoscaling(worker: WorkerSettings, aims: AutoscalingSettings) -> AutoscalingConfig:
    """Returns Serve's settings: least and most replicas, and a policy with its aims."""
    name, kwargs = (
        "LoadPolicy",
        {"sequences": worker.sequences_per_replica, "cache_in_use": aims.cache_in_use},
    )
    if isinstance(worker, TargetSettings) and worker.ttft_target_s is not None:
        name, kwargs = "FirstTokenPolicy", {**kwargs, "ttft_target_s": worker.ttft_target_s}
    return AutoscalingConfig(
        min_replicas=worker.replicas,
        max_replicas=worker.most_replicas,
        upscale_delay_s=aims.up_delay_s,
        downscale_delay_s=aims.down_delay_s,
        look_back_period_s=LOOK_BACK_S,
        policy=AutoscalingPolicy(policy_function=f"{__name__}:{name}", policy_kwargs=kwargs),
    )
