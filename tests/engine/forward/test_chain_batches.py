"""Batches of chains: each holds what a batch that was laid out for it alone holds."""

import pytest
import torch

from outrider.decoding.draft import Draft
from outrider.engine.forward.chain_batches import ChainBatches
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.inputs.block_tables import BlockTables
from outrider.engine.inputs.paged_input import FEW_TILE
from outrider.engine.inputs.step_input import Feed, StepInput
from tests.support.paged_attention import laid_out

BLOCK_SIZE = 4


def feed(tokens: list[int], num_logits: int, start: int, first_block: int) -> Feed:
    """Returns the feed of tokens to a sequence that holds every other block from ``first_block`` on."""
    return Feed(tokens, num_logits, start, HeldBlocks(range(first_block, first_block + 8, 2)), None)


@pytest.mark.parametrize("start", [5, 6, 7, 8])  # the last two end in the next block
def test_chain_batches_next_batch_is_as_if_laid_out_alone(start: int) -> None:
    tables = BlockTables((6, 4), BLOCK_SIZE, 0, torch.device("cpu"))
    batches = ChainBatches(tables, torch.float32)
    before = [feed([11, 12], 1, start - 1, 0), feed([13], 1, 2, 20), feed([14, 15, 16], 3, 0, 1)]
    batches.of(StepInput.of(tables, before))
    feeds = [feed([21, 22], 1, start, 40), feed([23], 1, 1, 3), feed([24, 25, 26], 3, 4, 1)]
    step = StepInput.of(tables, feeds)
    batch, expected = batches.of(step), laid_out(step, tables)
    assert batch is not None
    assert batch.paged is not None
    for name, numbers in vars(expected).items():
        assert torch.equal(getattr(batch.paged, name), numbers), name
    assert torch.equal(batch.token_ids, expected.token_ids)
    assert torch.equal(batch.logit_rows, expected.logit_rows)


@pytest.mark.parametrize(
    "other",
    [
        Feed([1, 2], 2, 0, HeldBlocks(range(4)), Draft((1, 2), (-1, -1))),
        Feed([1] * (FEW_TILE + 1), 1, 0, HeldBlocks(range(4)), None),
    ],
)
def test_chain_batches_other_feeds_get_none(other: Feed) -> None:
    tables = BlockTables((2, 4), BLOCK_SIZE, 0, torch.device("cpu"))
    step = StepInput.of(tables, [feed([11], 1, 3, 0), other])
    assert ChainBatches(tables, torch.float32).of(step) is None
