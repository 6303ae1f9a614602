"""Where the processes of a target's ranks meet."""

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from outrider.engine.loading.weights import resolve_device
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.settings import EngineSettings


def place_at(host: str) -> TCPStore:
    """At rank 0: on a free port of its host."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


def meet(settings: EngineSettings, store: TCPStore, rank: int) -> RankGroup:
    """Returns when all have come."""
    device = resolve_device(settings.device)  # Ray lets each process see its own GPU alone
    return RankGroup(store, rank, settings.tensor_parallel, device)
