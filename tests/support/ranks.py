"""Tensor-parallel group of processes on this machine, each on the CPU or on a simulated GPU."""

import multiprocessing
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import TCPStore, device_mesh  # type: ignore[attr-defined]

from outrider.engine.loop.follower import follow
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.parallel import step_channel
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.settings import EngineSettings
from tests.support.patience import START_S
from tests.support.simulated_cuda.install import simulated_cuda

Part = Callable[..., Any]  # its first argument is the group; importable by name, to be pickled


class Ranks:
    """Processes of one group, which run one part after another."""

    def __init__(self, size: int, *, on_gpus: bool = False, are_apart: bool = False) -> None:
        """
        Args:
            on_gpus: whether each rank has a simulated GPU.
            are_apart: whether ranks share no memory, as on several machines.
        """
        spawn = multiprocessing.get_context("spawn")
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = [spawn.Pipe() for _ in range(size)]
        self._ends = [own_end for own_end, _ in pipes]
        self.processes = [
            spawn.Process(target=_serve, args=(rank_end, self._store.port, rank, size, on_gpus, are_apart))
            for rank, (_, rank_end) in enumerate(pipes)
        ]
        for process, (_, rank_end) in zip(self.processes, pipes, strict=True):
            process.start()
            rank_end.close()

    def run(self, lead: Part, follow: Part, *arguments: Any) -> list[Any]:
        """Runs ``lead`` at rank 0 and ``follow`` at the other ranks. Returns the results by rank."""
        return [self.lead(lead, follow, *arguments), *map(_answer, self._ends[1:])]

    def lead(self, lead: Part, follow: Part, *arguments: Any) -> Any:
        """Runs a part at each rank and returns the result of rank 0 alone; other ranks may have ended."""
        for rank, end in enumerate(self._ends):
            end.send((follow if rank else lead, arguments))
        return _answer(self._ends[0])

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def follow_to_the_end(group: RankGroup, settings: EngineSettings, *_: object) -> None:
    """Follows the steps of rank 0 until rank 0 shuts its engine down. Further arguments are ignored."""
    follow(load_forward_pass(settings, group), group)


def _answer(end: Connection) -> Any:
    assert end.poll(START_S), "a rank does not answer"
    return end.recv()


def _serve(orders: Connection, port: int, rank: int, size: int, on_gpus: bool, are_apart: bool) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    # Each mesh has its own connections, polled by threads of gloo, so all models share one mesh.
    dist.init_device_mesh = cache(device_mesh.init_device_mesh)  # type: ignore[assignment, attr-defined]
    nowhere = patch.object(step_channel, "_reached", return_value=None)
    with simulated_cuda() if on_gpus else nullcontext(), nowhere if are_apart else nullcontext():
        device = torch.device("cuda" if on_gpus else "cpu")
        group = RankGroup(TCPStore("127.0.0.1", port), rank, size, device)
        while True:
            part, arguments = orders.recv()
            orders.send(part(group, *arguments))
