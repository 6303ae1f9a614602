"""A rank that hangs while a target loads takes its group down: an actor of Ray stands for Serve's replica."""

import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import actors.worker
from actors.rank import OtherRanks
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import write_checkpoint
from tests.support.patience import PATIENCE, START_S, wait_until
from tests.support.trust import TRUST

pytestmark = pytest.mark.slow
LOAD_S = 30.0 * PATIENCE  # both ranks have started by then


@pytest.fixture(scope="module")
def bundles() -> Iterator[PlacementGroup]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of Ray about GPUs
        ray.init(address="local", num_cpus=2, include_dashboard=False)
    try:
        bundles = placement_group([{"CPU": 1}] * 2)
        ray.get(bundles.ready())
        yield bundles
    finally:
        ray.shutdown()


def have_met(one: int, other: int, port: int) -> bool:
    """Whether these processes are connected, and not only through the port at which they meet."""
    ends = [psutil.Process(pid).net_connections("tcp") for pid in (one, other)]
    of_other = {end.laddr for end in ends[1]}
    return any(end.raddr in of_other and port not in (end.laddr.port, end.raddr.port) for end in ends[0])


class Replica:
    """A target of two ranks, of which one is stopped: before the two have met, or as soon as they have."""

    def __init__(self, settings: EngineSettings, folder: Path, stopped: int, moment: str) -> None:
        class Stopping(OtherRanks):
            def meet(self, port: int) -> None:
                [engine] = psutil.Process().children()
                others = ray.get([actor.place.remote() for actor in self._actors])
                pids = engine.pid, *(place.pid for place in others), os.getpid()
                (folder / "pids").write_text(" ".join(map(str, pids)))
                if moment == "joins":
                    os.kill(pids[stopped], signal.SIGSTOP)
                super().meet(port)
                if moment == "loads":
                    wait_until(lambda: have_met(pids[0], pids[1], port))
                    os.kill(pids[stopped], signal.SIGSTOP)

        setattr(actors.worker, "OtherRanks", Stopping)  # noqa: B010
        actors.worker.TargetWorker(settings, TRUST, lambda: lambda: None)


@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.parametrize("moment", ["joins", "loads"])
def test_hanging_rank_ends_its_group(
    bundles: PlacementGroup, tmp_path: Path, stopped: int, moment: str
) -> None:
    checkpoint = write_checkpoint(tmp_path / "llama", "llama")
    settings = EngineSettings(
        model=str(checkpoint), cache_memory=2**22, threads=1, tensor_parallel=2, load_timeout_s=LOAD_S
    )
    first = PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=0)
    replica = ray.remote(Replica).options(num_cpus=1, scheduling_strategy=first)
    started = replica.remote(settings, tmp_path, stopped, moment)
    with pytest.raises(RayActorError):
        ray.get(started.__ray_ready__.remote(), timeout=START_S)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], START_S)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    if stopped and moment == "joins":
        assert "of 2 ranks these have not come to" in said(pids)
    # A stopped engine is noticed by its frontend, which then leaves; another rank by the time that it takes.
    assert (f"load_timeout_s={LOAD_S:g}" if stopped else "ended by signal 9") in said(pids)


def said(pids: list[int]) -> str:
    """Text of these processes on standard error."""
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    return "".join(log.read_text() for pid in pids for log in logs.glob(f"worker-*-{pid}.err"))
