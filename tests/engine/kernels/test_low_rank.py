"""Changes of adapters on a GPU: near those in float64, and with the same bits in any company.

Triton's interpreter computes them where there is no GPU.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.inputs.block_tables import BlockTables
from outrider.engine.inputs.paged_input import PagedInput, PagedLayout, fill
from outrider.engine.inputs.step_input import Feed, StepInput

low_rank = pytest.importorskip("outrider.engine.kernels.low_rank", reason="needs triton: pip install triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INPUTS, OUTPUTS, MOST = 1100, 72, 80  # two parts of inputs, two tiles of ranks and of outputs
RANKS = (0, 4, MOST, 24)  # ranks by the adapter's number; 0: it changes another layer


class Memory:
    """Weights of some adapters, and the table of their addresses."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.table = torch.zeros(1 + len(RANKS), 3, dtype=torch.int64, device=DEVICE)
        self.weights: dict[int, tuple[Tensor, Tensor]] = {}
        for number, rank in enumerate(RANKS, 1):
            drawn = (torch.randn(rank, size, generator=generator) for size in (INPUTS, OUTPUTS))
            shrink, expand = (weight.to(DEVICE, dtype) / 8 for weight in drawn)
            self.weights[number] = shrink, expand
            self.table[number] = torch.tensor([shrink.data_ptr(), expand.data_ptr(), rank])

    def added(self, adapters: list[int], rows: Tensor, output: Tensor, room: int = 0) -> Tensor:
        """Output with the changes of each row's adapter. room: rows of padding in the step's input."""
        tables = BlockTables((len(adapters), 1), 16, 0, DEVICE)
        feeds = [Feed([1], 1, 0, HeldBlocks([number]), None, one) for number, one in enumerate(adapters)]
        layout = PagedLayout.padded(len(rows) + room, as_chains=False).with_adapters(len(RANKS))
        step = StepInput.of(tables, feeds)
        fields = fill(replace(layout, new_blocks=len(step.new_blocks)), step, tables).sent()
        given = PagedInput.of(fields, tables.on_device)
        padding = (0, 0, 0, room)
        rows, output = (torch.nn.functional.pad(numbers, padding, value=3.0) for numbers in (rows, output))
        low_rank.add_low_rank(rows, self.table, given.adapter_rows, given.adapter_tiles, MOST, output)
        assert (output[len(adapters) :] == 3.0).all()
        return output[: len(adapters)]


def drawn(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of a layer, and its output without changes."""
    generator = torch.Generator().manual_seed(count)
    rows, output = (torch.randn(count, size, generator=generator) for size in (INPUTS, OUTPUTS))
    return rows.to(DEVICE, dtype), output.to(DEVICE, dtype)


MIXED = [2, 0, 4, 1, 2, 3, 0, 4, *[3] * 18, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_low_rank_changes_are_those_of_each_rows_own_adapter(dtype: torch.dtype) -> None:
    memory, (rows, output) = Memory(dtype), drawn(len(MIXED), dtype)
    found = memory.added(MIXED, rows, output, room=5)
    for adapter, row, before, after in zip(MIXED, rows, output, found, strict=True):
        if not adapter:
            assert torch.equal(after, before)
            continue
        shrink, expand = (weight.double() for weight in memory.weights[adapter])
        expected = before.double() + (shrink @ row.double()) @ expand
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(after.double(), expected, atol=tolerance, rtol=tolerance)


def test_row_has_the_same_bits_alone_and_beside_rows_of_other_adapters() -> None:
    """Sums are compared in float32, since a narrower type would hide another order."""
    memory, (rows, output) = Memory(torch.float32), drawn(len(MIXED), torch.float32)
    together = memory.added(MIXED, rows, output)
    order = np.random.default_rng(0).permutation(len(MIXED))
    shuffled = memory.added([MIXED[row] for row in order], rows[order], output[order], room=9)
    assert torch.equal(shuffled, together[order])
    for row in (0, 2, 10, 25):
        alone = memory.added([MIXED[row]], rows[row : row + 1], output[row : row + 1])
        assert torch.equal(alone[0], together[row])
