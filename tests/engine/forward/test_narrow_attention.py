"""Attention over a narrow cache undoes the scales by which its numbers were stored."""

import pytest
import torch

from outrider.engine.cache.key_values import KeyValues
from outrider.engine.cache.narrow import NARROW, Scales
from outrider.engine.forward.attention import Paged, attended, store
from outrider.engine.forward.batch import Batch, pack, paged_batch
from outrider.engine.forward.kernel import Kernel
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.kernels.cpu.attention import CpuAttention
from tests.support.functions import needs_functions
from tests.support.paged_attention import laid_out, tables_for

CPU = torch.device("cpu")
BLOCK_SIZE, TOKENS, HEADS, DIM = 4, 7, 2, 16


def batch_of(*, has_kernel: bool) -> Batch:
    feeds = [Feed([0] * TOKENS, 1, 0, HeldBlocks([2, 0]), None)]
    tables = tables_for(feeds, BLOCK_SIZE)
    step = StepInput.of(tables, feeds)
    if not has_kernel:
        return pack(step.feeds, tables, torch.float32)
    given = laid_out(step, tables)
    return paged_batch(given, given.logit_rows, BLOCK_SIZE, torch.float32)


@pytest.mark.parametrize("has_kernel", [pytest.param(True, marks=needs_functions), False])
def test_attention_over_scaled_numbers_is_attention_over_the_numbers(has_kernel: bool) -> None:
    """Bit for bit, as neither scale takes a number out of the narrow type's range."""
    batch, generator = batch_of(has_kernel=has_kernel), torch.Generator().manual_seed(0)
    key, value = (1 + torch.rand(TOKENS, HEADS, DIM, generator=generator) for _ in range(2))
    query = torch.randn(2 * HEADS, TOKENS, DIM, generator=generator)
    kernel: Kernel | None = CpuAttention(BLOCK_SIZE) if has_kernel else None
    outputs = []
    for scales in ({}, {0: Scales(4.0, 0.25)}):
        cache = KeyValues({0: (HEADS, DIM, DIM)}, 3, BLOCK_SIZE, NARROW, CPU, scales)
        paged = Paged(batch, cache, kernel)
        store(paged, 0, key, value)
        outputs.append(attended(paged, 0, query, scaling=None, window=None))
    assert outputs[0].any()
    assert torch.equal(*outputs)
