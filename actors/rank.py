"""The ranks of a tensor-parallel target: rank 0 is the engine's process of a replica, the others are actors.

A replica's front starts them all. What takes torch is imported where it is used: the front uses none of it.
"""

import logging
import os
import threading

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.garbage import importing
from actors.leaving import leave
from outrider.engine.settings import EngineSettings

logger = logging.getLogger("ray.serve")


class Rank:
    """A rank other than 0, in a process of its own, which it leaves if anything goes wrong."""

    def __init__(self) -> None:
        with importing():
            import outrider.engine.parallel.follower  # noqa: F401

    def pid(self) -> int:
        return os.getpid()

    def follow(
        self, settings: EngineSettings, host: str, port: int, rank: int, leader: ray.actor.ActorHandle
    ) -> None:
        """Does what rank 0 orders until it has no more.

        Args:
            host, port: of the store where they meet.
            leader: the actor whose engine is rank 0. What hangs while they load may be that process.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from actors.meeting import meet
        from actors.watchdog import loading
        from outrider.engine.drafters.beside_target import beside_target
        from outrider.engine.forward.forward_pass import ForwardPass
        from outrider.engine.parallel.follower import follow
        from outrider.engine.planning.device_room import bound_allocator

        def end_all(reason: str) -> None:
            logger.critical("rank %d of the target ends its group: %s", rank, reason)
            ray.kill(leader)

        try:
            with loading(settings.load_timeout_s, end_all):
                bound_allocator(settings)
                group = meet(settings, TCPStore(host, port), rank)
                forward = ForwardPass(settings, group, beside_target(settings))
            follow(forward, group)
        except BaseException as error:
            leave(f"rank {rank} of the target: {error!r}")


class OtherRanks:
    """At the front: those in the bundles of this replica's placement group that follow its own.

    This process leaves as soon as one of them does.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self.host: str = ray.util.get_node_ip_address()  # where rank 0 is
        bundles = ray.util.get_current_placement_group()
        self._actors = [_start(bundles, rank) for rank in range(1, settings.tensor_parallel)]
        self.pids: tuple[int, ...] = ()  # once they have been sent to rank 0

    def meet(self, port: int) -> None:
        """Sends them to where rank 0 waits."""
        leader = ray.get_runtime_context().current_actor
        self.pids = tuple(ray.get([actor.pid.remote() for actor in self._actors]))
        following = [
            actor.follow.remote(self._settings, self.host, port, rank, leader)
            for rank, actor in enumerate(self._actors, start=1)
        ]
        threading.Thread(target=_watch, args=(following,), name="ranks", daemon=True).start()


def _watch(following: list[ray.ObjectRef]) -> None:
    (first,), _ = ray.wait(following, num_returns=1)
    try:
        ray.get(first)
    except RayError as error:
        # Ray ends the others with the process that started them, a stopped one too.
        leave(f"a rank of the target is gone: {error!r}")


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
