"""Group of processes that hold a model on several devices: rank 0 leads, the other ranks follow.

Rank 0 schedules and samples. It sends each step to the other ranks as ids and indices. Then all ranks run the
same forward pass, each over its share of the weights and of the key/value heads. Tokens that rank 0 has only
on its device are broadcast to the devices of the other ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from outrider.engine.errors import RankLostError
from outrider.engine.inputs.block_tables import BlockTables
from outrider.engine.inputs.step_input import StepInput
from outrider.engine.parallel.adapter_change import AdapterChange
from outrider.engine.parallel.drafter_step import DrafterStep
from outrider.engine.parallel.step_channel import broadcast, step_channel

# Fields of the header: whether there is work, its index in KINDS, number of chosen tokens, passes so far.
HEADER = 4
KINDS = (StepInput, DrafterStep, AdapterChange)
GLOO = "gloo/transport"  # part of gloo's message, in a plain RuntimeError, for a closed connection
FOREVER = timedelta(days=365)  # a rank waits for its next step until a request comes


class RankGroup:
    """Place of this process in its group. A process joins only one group in its lifetime."""

    def __init__(self, store: TCPStore, rank: int, size: int, device: torch.device) -> None:
        """Joins the group; returns when all ranks have joined.

        Args:
            store: store of rank 0, to which the other ranks connect.
            rank: number of this process, from 0.
            size: ranks in the group.
            device: device of this rank. On CUDA, tensors are exchanged by NCCL.
        """
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
        store.set_timeout(FOREVER)  # NCCL uses the store at the first exchange, and a rank may load for long
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=FOREVER)
        self.rank, self.size = rank, size
        self._device = device
        self._channel = step_channel(store, rank, size, self.least)
        self.passes = 0  # successful passes of target and drafter here; must be equal at all ranks

    def least(self, number: int) -> int:
        """Returns the smallest of all ranks' numbers; every rank must call it."""
        numbers = torch.tensor([number])
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers)

    def agree(self, flags: torch.Tensor) -> None:
        """Clears each flag, bool of any shape, that is false at any rank; every rank must call it."""
        numbers = flags.to(torch.uint8)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        flags.copy_(numbers)

    def send(self, work: StepInput | DrafterStep | AdapterChange, chosen: torch.Tensor | None = None) -> None:
        """Sends the next work from rank 0 to the other ranks. The host does not wait for its device.

        chosen: [num_rows] on the device, for a step that feeds the tokens of the step before.

        Raises:
            RankLostError: a rank is gone.
        """
        num_chosen = 0 if chosen is None else len(chosen)
        header = np.array([1, KINDS.index(type(work)), num_chosen, self.passes])
        self._channel.send(np.concatenate([header, work.to_numbers()]))
        if chosen is not None:
            broadcast(chosen.to(torch.int32))

    def spread(self, rows: torch.Tensor) -> None:
        """Copies the rows of rank 0 to the devices of all ranks. Raises RankLostError."""
        broadcast(rows)

    def dismiss(self) -> None:
        """Tells the other ranks from rank 0 that no more work follows."""
        self._channel.send(np.zeros(HEADER, np.int64))

    def receive(
        self, tables: BlockTables
    ) -> tuple[StepInput, torch.Tensor | None] | DrafterStep | AdapterChange | None:
        """Waits for the next work, at a rank other than 0; None: no more work comes.

        tables: block tables of this rank, into which new blocks are written.

        Raises:
            RankLostError: rank 0 is gone, or rank 0 or this rank has failed alone.
        """
        received = self._channel.receive()
        is_work, kind, num_chosen, passes = received[:HEADER].tolist()
        if not is_work:
            return None
        if passes != self.passes:  # ranks would mix collective operations of different passes
            raise RankLostError(
                f"a pass failed at one rank alone: {passes} ran at rank 0, {self.passes} here"
            )
        numbers = received[HEADER:]
        if KINDS[kind] is AdapterChange:
            return AdapterChange.from_numbers(numbers)
        if KINDS[kind] is DrafterStep:
            return DrafterStep.from_numbers(numbers, tables)
        chosen = None
        if num_chosen:
            chosen = torch.empty(num_chosen, dtype=torch.int32, device=self._device)
            broadcast(chosen)
        return StepInput.from_numbers(numbers, tables), chosen


@contextmanager
def together(
    group: RankGroup | None,
    tables: BlockTables,
    step: StepInput | DrafterStep,
    chosen: torch.Tensor | None = None,
) -> Iterator[None]:
    """Context in which rank 0 runs its part of a step, after it has sent the step to the group, if any.

    A step that raises is not counted, and its new blocks are sent again. Arguments and errors as for
    ``RankGroup.send``; collective operations within the pass raise the same errors.
    """
    if group is not None:
        group.send(step, chosen)
    try:
        yield
    except Exception as error:
        tables.forget()
        if isinstance(error, RuntimeError) and GLOO in str(error):
            raise RankLostError(f"a rank of the group is gone: {error}") from error
        raise
    if group is not None:
        group.passes += 1
