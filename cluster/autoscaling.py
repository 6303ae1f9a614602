"""How many replicas of a worker there should be. Serve's controller runs this: it imports nothing heavy."""

import math
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from actors.usage import CACHE_IN_USE, SEQUENCES
from cluster.settings import AutoscalingSettings, WorkerSettings

LOOK_BACK_S = 15.0  # over which a replica's reports are averaged; one comes every 10
ROUNDING = 1e-6  # of averages: it wants no replica


class LoadPolicy:
    """So many replicas that neither their sequences nor their blocks exceed what is aimed at, on average."""

    def __init__(self, sequences: int, cache_in_use: float) -> None:
        """What to aim at per replica: open sequences, share of the blocks in use."""
        self._aims = {SEQUENCES: float(sequences), CACHE_IN_USE: cache_in_use}

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number wanted, which Serve delays and keeps within its limits, and no state."""
        reported = context.aggregated_metrics or {}
        if not any(reported.get(name) for name in self._aims):
            return context.target_num_replicas, {}  # nobody has reported yet
        wanted = (sum(reported.get(name, {}).values()) / aim for name, aim in self._aims.items())
        return max(1, math.ceil(max(wanted) - ROUNDING)), {}


def autoscaling(worker: WorkerSettings, aims: AutoscalingSettings) -> AutoscalingConfig:
    """Between as many replicas as there are at least and at most; the aims are LoadPolicy's."""
    return AutoscalingConfig(
        min_replicas=worker.replicas,
        max_replicas=worker.most_replicas,
        upscale_delay_s=aims.up_delay_s,
        downscale_delay_s=aims.down_delay_s,
        look_back_period_s=LOOK_BACK_S,
        policy=AutoscalingPolicy(
            policy_function="cluster.autoscaling:LoadPolicy",
            policy_kwargs={"sequences": worker.sequences_per_replica, "cache_in_use": aims.cache_in_use},
        ),
    )
