"""Tensor-parallel groups of processes on this machine, on the CPU."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import TCPStore

from engine.tensor_parallel import Group

TIMEOUT_S = 180.0
CPU = torch.device("cpu")

Role = Callable[..., Any]  # takes the group first; importable by name


def run_group(lead: Role, follow: Role, *arguments: Any, size: int = 2) -> list[Any]:
    """What each rank's function returns: ``lead`` at rank 0, ``follow`` at the others."""
    spawn = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, answers = [], []
    for rank in range(size):
        ours, theirs = spawn.Pipe()
        role = follow if rank else lead
        process = spawn.Process(target=_run, args=(theirs, store.port, rank, size, role, arguments))
        process.start()
        theirs.close()
        processes.append(process)
        answers.append(ours)
    try:
        for answer in answers:
            assert answer.poll(TIMEOUT_S), "a rank does not answer"
        results = [answer.recv() for answer in answers]
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    return results


def _run(answer: Connection, port: int, rank: int, size: int, role: Role, arguments: tuple[Any, ...]) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port)
    answer.send(role(Group(store, rank, size, CPU), *arguments))
