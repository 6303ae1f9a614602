"""Ranks of a tensor-parallel target: rank 0 is the engine's process of a replica, other ranks are actors.

A replica's frontend starts all ranks. It needs no torch, so functions that need torch import it.
"""

import logging
import os
import threading
from collections import Counter

import ray
from msgspec import structs
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.messages import ProcessPlace
from actors.place import (
    address,
    confine,
    gpus_given,
    meet_at,
    place_of,
    told,
    with_threads,
)
from actors.process import importing, leave
from actors.spinning import bound_spinning
from outrider.demo.written_out import write_out
from outrider.engine.settings import EngineSettings
from outrider.telemetry.debug_lines import show_debug_lines

logger = logging.getLogger(f"ray.serve.{__name__}")


class Rank:
    """Rank other than 0, in a process of its own, which exits on any error."""

    def __init__(self, settings: EngineSettings, rank: int, sharing: int) -> None:
        """sharing: ranks of its group on its node."""
        show_debug_lines()
        self._settings = with_threads(settings, sharing)
        self._rank = rank
        self._host: str = ray.util.get_node_ip_address()
        confine(os.environ, gpus_given())  # before torch reads the variable
        bound_spinning(os.environ)
        meet_at(os.environ, self._host)
        with importing():
            import outrider.engine.loop.follower
            import outrider.engine.loop.load  # noqa: F401

    def place(self) -> ProcessPlace:
        """Returns the place of this rank. Raises NoDeviceError."""
        self._place = structs.replace(place_of(self._settings, self._rank), node=node_here())
        return self._place

    def follow(self, host: str, port: int, leader: ray.actor.ActorHandle) -> None:
        """Executes the steps of rank 0 until rank 0 dismisses the group; called after ``place``.

        Args:
            host, port: address of the store at rank 0.
            leader: actor whose engine is rank 0; it is killed if the load times out.
        """
        settings, rank = self._settings, self._rank
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from actors.meeting import meet
        from actors.watchdog import loading
        from outrider.engine.drafters.target_drafters import TargetDrafters
        from outrider.engine.loop.follower import follow
        from outrider.engine.loop.load import load_forward_pass
        from outrider.engine.planning.device_room import bound_allocator, within_share

        def end_all(reason: str) -> None:
            logger.critical("rank %d of the target ends its group: %s", rank, reason)
            ray.kill(leader)

        try:
            with within_share(settings), loading(settings.load_timeout_s, end_all) as load:
                write_out(settings.model)
                bound_allocator(settings)
                load.doing = f"rank {rank} at {self._host} does not reach rank 0 at {host}:{port}"
                group = meet(settings, TCPStore(host, port), rank, address(self._host, self._place), load)
                forward = load_forward_pass(settings, group, TargetDrafters.of(settings))
            with within_share(settings):
                follow(forward, group)
        except BaseException as error:
            leave(f"rank {rank} of the target: {error!r}")


class OtherRanks:
    """Ranks other than 0, started by the frontend in the later bundles of the replica's placement group.

    The frontend's process ends as soon as a rank ends.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.host: str = ray.util.get_node_ip_address()  # node of rank 0
        bundles = ray.util.get_current_placement_group()
        nodes = placement_group_table(bundles)["bundles_to_node_id"]
        sharing = Counter(nodes.values())
        self.beside_rank_0 = sharing[nodes[0]]  # ranks on its node, including rank 0
        self._actors = [
            _start(bundles, settings, rank, sharing[nodes[rank]])
            for rank in range(1, settings.tensor_parallel)
        ]
        self.places: tuple[ProcessPlace, ...] = ()  # set by ``meet``

    def meet(self, port: int) -> None:
        """Sends the ranks to the address at which rank 0 waits."""
        leader = ray.get_runtime_context().current_actor
        self.places = tuple(ray.get([actor.place.remote() for actor in self._actors]))
        for place in self.places:
            logger.info("%s", told(place))
        following = [actor.follow.remote(self.host, port, leader) for actor in self._actors]
        threading.Thread(target=_watch, args=(following,), name="ranks", daemon=True).start()


def _watch(following: list[ray.ObjectRef]) -> None:
    (first,), _ = ray.wait(following, num_returns=1)
    try:
        ray.get(first)
    except RayError as error:
        # Ray ends the other ranks with the process that started them, even a stopped rank.
        leave(f"a rank of the target is gone: {error!r}")


def node_here() -> str:
    """Returns the id of this process's node in Ray."""
    node: str = ray.get_runtime_context().get_node_id()
    return node


def _start(
    bundles: PlacementGroup, settings: EngineSettings, rank: int, sharing: int
) -> ray.actor.ActorHandle:
    """Starts a rank with all resources of its bundle."""
    resources = dict(bundles.bundle_specs[rank])
    resources.pop("CPU", None)
    options = {
        "num_cpus": 0,
        "num_gpus": resources.pop("GPU", 0.0),
        "resources": resources,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=rank),
    }
    return ray.remote(Rank).options(**options).remote(settings, rank, sharing)
