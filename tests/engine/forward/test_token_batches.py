"""Batches of one token per sequence: each holds what a batch that was laid out for it alone holds."""

import numpy as np
import pytest
import torch

from outrider.engine.forward.token_batches import TokenBatches
from outrider.engine.inputs.paged_input import PagedInput, PagedLayout, fill
from outrider.engine.inputs.step_input import Feed

BLOCK_SIZE = 4


def feed(token: int, start: int, first_block: int) -> Feed:
    """Returns the feed of a token to a sequence that holds every other block from ``first_block`` on."""
    return Feed([token], 1, start, np.arange(first_block, first_block + 8, 2), None)


@pytest.mark.parametrize("start", [5, 6, 7, 8])  # the last is in the next block
def test_token_batches_next_batch_is_as_if_laid_out_alone(start: int) -> None:
    batches = TokenBatches(BLOCK_SIZE, torch.float32)
    batches.of([feed(11, start - 1, 0), feed(12, 2, 20), feed(13, 0, 1)])
    feeds = [feed(21, start, 40), feed(22, 1, 3), feed(23, 4, 1)]
    batch = batches.of(feeds)
    layout = PagedLayout.of(feeds, BLOCK_SIZE)
    expected = PagedInput.of(fill(layout, feeds, BLOCK_SIZE, 0, device=torch.device("cpu")).sent())
    assert batch is not None
    assert batch.paged is not None
    width = start // BLOCK_SIZE + 1
    for name, numbers in vars(expected).items():
        found = getattr(batch.paged, name)
        assert torch.equal(found[:, :width] if name == "block_table" else found, numbers), name
    assert torch.equal(batch.token_ids, expected.token_ids)
    assert torch.equal(batch.logit_rows, expected.logit_rows)


@pytest.mark.parametrize(
    "other", [Feed([1, 2], 1, 0, np.arange(4), None), Feed([1], 0, 0, np.arange(4), None)]
)
def test_token_batches_other_feeds_get_none(other: Feed) -> None:
    assert TokenBatches(BLOCK_SIZE, torch.float32).of([feed(11, 3, 0), other]) is None
