"""Group of processes that hold a model on several devices: rank 0 leads, the other ranks follow.

Rank 0 schedules and samples. A step's input reaches the other ranks in one broadcast of ids and indices. Then
all ranks run the same forward pass, each over its share of the weights and of the key/value heads. Tokens
that rank 0 has only on its device go from there to the devices of the other ranks.
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
from outrider.engine.inputs.step_input import Numbers, StepInput
from outrider.engine.parallel.drafter_step import DrafterStep

FRAME = 8192  # numbers of the first broadcast; the rest of a step follows in a second broadcast
# Fields of the header: numbers of the step, whether it is a drafter's, chosen tokens, passes before.
HEADER = 4
GLOO = "gloo/transport"  # part of gloo's message on a closed connection, in a plain RuntimeError
FOREVER = timedelta(days=365)  # a rank waits for its next step until a request comes


class RankGroup:
    """Place of this process in its group. A process has a single group in its life."""

    def __init__(self, store: TCPStore, rank: int, size: int, device: torch.device) -> None:
        """Joins the group; returns when all ranks have joined.

        Args:
            store: store of rank 0, to which the other ranks connect.
            rank: number of this process, from 0.
            size: ranks in the group.
            device: device of this rank. On CUDA tensors travel by NCCL; the numbers of a step always by gloo.
        """
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
        store.set_timeout(FOREVER)  # NCCL uses the store at the first exchange, and a rank may load for long
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=FOREVER)
        self.rank, self.size = rank, size
        self._frame = torch.zeros(FRAME, dtype=torch.int64)
        self._device = device
        self.passes = 0  # passes of target and drafter here that did not raise: as many as at rank 0

    def least(self, number: int) -> int:
        """Returns the smallest of all ranks' numbers; each rank has to call it."""
        numbers = torch.tensor([number])
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers)

    def agree(self, flags: torch.Tensor) -> None:
        """Clears each flag, bool of any shape, that is false at any rank; each rank has to call it."""
        numbers = flags.to(torch.uint8)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        flags.copy_(numbers)

    def send(self, step: StepInput | DrafterStep, chosen: torch.Tensor | None = None) -> None:
        """Sends the next work from rank 0 to the other ranks. The host does not wait for its device.

        chosen: [num_rows] on the device, for a step that feeds the tokens of the step before.

        Raises:
            RankLostError: a rank is gone.
        """
        num_chosen = 0 if chosen is None else len(chosen)
        self._send(step.to_numbers(), int(isinstance(step, DrafterStep)), num_chosen)
        if chosen is not None:
            _broadcast(chosen.to(torch.int32))

    def spread(self, rows: torch.Tensor) -> None:
        """Copies the rows of rank 0 to the devices of all ranks. Raises RankLostError."""
        _broadcast(rows)

    def dismiss(self) -> None:
        """Sends the end of work for this model from rank 0 to the other ranks."""
        self._send(np.zeros(0, np.int64))

    def receive(self, tables: BlockTables) -> tuple[StepInput, torch.Tensor | None] | DrafterStep | None:
        """Waits for the next work, at a rank other than 0; None: no more work comes.

        tables: block tables of this rank, into which new blocks are written.

        Raises:
            RankLostError: rank 0 is gone, or rank 0 or this rank has failed alone.
        """
        _broadcast(self._frame)
        length, is_drafters, num_chosen, passes = self._frame[:HEADER].tolist()
        if not length:
            return None
        if passes != self.passes:  # else exchanges would meet those of another pass
            raise RankLostError(
                f"a pass failed at one rank alone: {passes} ran at rank 0, {self.passes} here"
            )
        numbers = self._frame[HEADER : HEADER + length]
        if length > len(numbers):
            rest = torch.empty(length - len(numbers), dtype=torch.int64)
            _broadcast(rest)
            numbers = torch.cat([numbers, rest])
        if is_drafters:
            return DrafterStep.from_numbers(numbers.numpy(), tables)
        chosen = None
        if num_chosen:
            chosen = torch.empty(num_chosen, dtype=torch.int32, device=self._device)
            _broadcast(chosen)
        return StepInput.from_numbers(numbers.numpy(), tables), chosen

    def _send(self, numbers: Numbers, is_drafters: int = 0, num_chosen: int = 0) -> None:
        content = torch.from_numpy(numbers)
        room = FRAME - HEADER
        begin, rest = content[:room], content[room:]
        self._frame[:HEADER] = torch.tensor([len(content), is_drafters, num_chosen, self.passes])
        self._frame[HEADER : HEADER + len(begin)] = begin
        _broadcast(self._frame)
        if len(rest):
            _broadcast(rest)


@contextmanager
def together(
    group: RankGroup | None,
    tables: BlockTables,
    step: StepInput | DrafterStep,
    chosen: torch.Tensor | None = None,
) -> Iterator[None]:
    """Context of rank 0 for its part of a step; without a group its part is the whole step.

    A step that raises does not count, and its new blocks are told again. Arguments and errors: those of
    ``RankGroup.send``. An exchange in the middle of a pass raises these errors as well.
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


def _broadcast(numbers: torch.Tensor) -> None:
    """Broadcasts from rank 0 to all. Raises RankLostError."""
    try:
        dist.broadcast(numbers, 0)
    except RuntimeError as error:  # gloo's error for a closed connection
        raise RankLostError(f"a rank of the group is gone: {error}") from error
