"""Rendezvous of the processes of a target's ranks: a store, and the group that they form."""

import time

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from actors.watchdog import Loading
from outrider.engine.loading.weights import resolve_device
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.settings import EngineSettings

LOOK_S = 0.05  # seconds between two looks for missing ranks


def meet(settings: EngineSettings, store: TCPStore, rank: int, address: str, load: Loading) -> RankGroup:
    """Waits for all ranks and returns their group. If a rank is missing, the load times out.

    Args:
        store: meeting place of the ranks.
        rank: number of this process.
        address: address of this process's node, with the interface to other ranks.
        load: watched load; its description names missing ranks.
    """
    store.set(_key(rank), address)
    there = _await_all(store, settings.tensor_parallel, load)
    load.doing = (
        f"all ranks have come to {store.host}:{store.port} and do not reach one another: {there};"
        " GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface"
    )
    # Each process sees only its own GPU.
    group = RankGroup(store, rank, settings.tensor_parallel, resolve_device(settings.device))
    load.doing = f"all ranks have met: {there}"
    return group


def _await_all(store: TCPStore, size: int, load: Loading) -> str:
    """Waits until all ranks have published their addresses, and returns these as text."""
    come: dict[int, str] = {}
    while len(come) < size:
        for rank in range(size):
            if rank not in come and store.check([_key(rank)]):
                come[rank] = store.get(_key(rank)).decode()
        missing = ", ".join(str(rank) for rank in range(size) if rank not in come)
        load.doing = f"of {size} ranks these have not come to {store.host}:{store.port}: {missing}; "
        load.doing += f"there are {_listed(come)}"
        if missing:
            time.sleep(LOOK_S)
    return _listed(come)


def _listed(come: dict[int, str]) -> str:
    return ", ".join(f"rank {rank} at {address}" for rank, address in sorted(come.items()))


def _key(rank: int) -> str:
    return f"outrider/address/{rank}"
