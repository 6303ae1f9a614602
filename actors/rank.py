"""The ranks of a tensor-parallel target: rank 0 is in the replica, the others are actors of its own."""

import threading

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from actors.leaving import leave
from engine.follow import follow
from engine.settings import EngineSettings
from engine.tensor_parallel import Group
from engine.weights import resolve_device


class Rank:
    """A rank other than 0, in a process of its own, which it leaves if anything goes wrong."""

    def follow(self, settings: EngineSettings, host: str, port: int, rank: int) -> None:
        """Does what rank 0 orders until it has no more; at host and port is the store where they meet."""
        try:
            follow(settings, _group(settings, TCPStore(host, port), rank))
        except BaseException as error:
            leave(f"rank {rank} of the target: {error!r}")


def join_with_others(settings: EngineSettings) -> Group:
    """At rank 0: starts the other ranks in the bundles of this replica's placement group that follow its own.

    From then on this process leaves as soon as one of them does.
    """
    host = ray.util.get_node_ip_address()
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    bundles = ray.util.get_current_placement_group()
    ranks = {rank: _start(bundles, rank) for rank in range(1, settings.tensor_parallel)}
    following = {
        actor.follow.remote(settings, host, store.port, rank): actor for rank, actor in ranks.items()
    }
    threading.Thread(target=_watch, args=(following,), name="ranks", daemon=True).start()
    return _group(settings, store, 0)


def _group(settings: EngineSettings, store: TCPStore, rank: int) -> Group:
    device = resolve_device(settings.device)  # Ray lets each process see its own GPU alone
    return Group(store, rank, settings.tensor_parallel, device)


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


def _watch(following: dict[ray.ObjectRef, ray.actor.ActorHandle]) -> None:
    """Holds on to the actors: without a handle Ray would end them."""
    (first,), _ = ray.wait(list(following), num_returns=1)
    try:
        ray.get(first)
    except RayError as error:
        for actor in following.values():
            ray.kill(actor)  # one that is stopped would not notice that its group is gone
        leave(f"a rank of the target is gone: {error!r}")
