"""The ranks of a tensor-parallel target: rank 0 is in the replica, the others are actors of its own."""

import logging
import os
import threading

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from actors.leaving import leave
from actors.watchdog import loading
from outrider.engine.forward.forward_pass import ForwardPass
from outrider.engine.loading.weights import resolve_device
from outrider.engine.parallel.follower import follow
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.settings import EngineSettings

logger = logging.getLogger("ray.serve")


class Rank:
    """A rank other than 0, in a process of its own, which it leaves if anything goes wrong."""

    def pid(self) -> int:
        return os.getpid()

    def follow(
        self, settings: EngineSettings, host: str, port: int, rank: int, leader: ray.actor.ActorHandle
    ) -> None:
        """Does what rank 0 orders until it has no more.

        Args:
            host, port: of the store where they meet.
            leader: the actor in whose process rank 0 is. What hangs while they load may be that process.
        """

        def end_all(reason: str) -> None:
            logger.critical("rank %d of the target ends its group: %s", rank, reason)
            ray.kill(leader)

        try:
            with loading(settings.load_timeout_s, end_all):
                group = _group(settings, TCPStore(host, port), rank)
                forward = ForwardPass(settings, group)
            follow(forward, group)
        except BaseException as error:
            leave(f"rank {rank} of the target: {error!r}")


class OtherRanks:
    """At rank 0: the others, in the bundles of this replica's placement group that follow its own.

    This process leaves as soon as one of them does.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        bundles = ray.util.get_current_placement_group()
        leader = ray.get_runtime_context().current_actor
        self._actors = [_start(bundles, rank) for rank in range(1, settings.tensor_parallel)]
        self.pids: tuple[int, ...] = tuple(ray.get([actor.pid.remote() for actor in self._actors]))
        self._following = [
            actor.follow.remote(settings, host, self._store.port, rank, leader)
            for rank, actor in enumerate(self._actors, start=1)
        ]
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def join(self) -> RankGroup:
        """Returns when all have come."""
        return _group(self._settings, self._store, 0)

    def _watch(self) -> None:
        (first,), _ = ray.wait(self._following, num_returns=1)
        try:
            ray.get(first)
        except RayError as error:
            # Ray ends the others with the process that started them, a stopped one too.
            leave(f"a rank of the target is gone: {error!r}")


def _group(settings: EngineSettings, store: TCPStore, rank: int) -> RankGroup:
    device = resolve_device(settings.device)  # Ray lets each process see its own GPU alone
    return RankGroup(store, rank, settings.tensor_parallel, device)


def _start(bundles: PlacementGroup, rank: int) -> ray.actor.ActorHandle:
    """With all that its bundle has."""
    resources = dict(bundles.bundle_specs[rank])
    resources.pop("CPU", None)
    options = {
        "num_cpus": 0,
        "num_gpus": resources.pop("GPU", 0.0),
        "resources": resources,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=rank),
    }
    return ray.remote(Rank).options(**options).remote()
