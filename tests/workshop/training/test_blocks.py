"""Attention of many blocks at once against each of them alone."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from workshop.training.blocks import Blocks

LENGTH, SIZE, HEADS, KV_HEADS, DIM = 9, 3, 4, 2, 8
ANCHORS = (1, 4, 8)


def drawn(heads: int, count: int, seed: int) -> torch.Tensor:
    return torch.randn(2, heads, count, DIM, generator=torch.Generator().manual_seed(seed))


def test_row_sees_the_text_before_its_anchor_and_its_block_up_to_itself() -> None:
    text_key, text_value = drawn(KV_HEADS, LENGTH, 0), drawn(KV_HEADS, LENGTH, 1)
    count = SIZE * len(ANCHORS)
    query, key, value = (drawn(heads, count, 2 + heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    blocks = Blocks(torch.tensor(ANCHORS), SIZE, LENGTH)
    blocks.read(text_key, text_value)
    found = blocks.attend(0, query, key, value, scaling=0.3)
    for number, anchor in enumerate(ANCHORS):
        rows = slice(SIZE * number, SIZE * (number + 1))
        keys, values = (
            torch.cat([text[:, :, :anchor], own[:, :, rows]], dim=2)
            for text, own in ((text_key, key), (text_value, value))
        )
        sees = torch.ones(SIZE, anchor + SIZE, dtype=torch.bool).tril(anchor)
        alone = scaled_dot_product_attention(
            query[:, :, rows],
            keys,
            values,
            attn_mask=sees,
            scale=0.3,
            enable_gqa=True,
        )
        torch.testing.assert_close(found[:, :, rows], alone, atol=1e-5, rtol=1e-5)
