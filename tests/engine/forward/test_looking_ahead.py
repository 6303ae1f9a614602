"""Attention of tokens that see the tokens fed after them, with each kernel and without."""

import pytest
import torch

from outrider.engine.cache.key_values import KeyValues
from outrider.engine.forward.attention import Paged, attended
from outrider.engine.forward.batch import pack, paged_batch
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.inputs.paged_input import PagedLayout
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.kernels.cpu.attention import CpuAttention
from outrider.engine.kernels.cpu.functions import compiled
from tests.support.paged_attention import laid_out, tables_for

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, BLOCK_SIZE, SLOTS = 4, 2, 16, 8, 640
# Slots before, tokens, and whether they look ahead.
STEP = [
    (50, 6, True),
    (33, 5, False),
    (0, 20, True),
    (7, 1, True),
    (100, 40, True),
    (61, 16, True),
    (0, 9, False),
]


def feeds() -> list[Feed]:
    made, taken = [], 0
    for start, count, looks_ahead in STEP:
        blocks = list(range(taken, taken + -(-(start + count) // BLOCK_SIZE)))
        taken += len(blocks)
        made.append(Feed([0] * count, 1, start, HeldBlocks(blocks), None, looks_ahead=looks_ahead))
    return made


def expected(query: torch.Tensor, cache: KeyValues, window: int | None) -> torch.Tensor:
    """Returns what plain attention says: [num_tokens, heads, dim]."""
    outputs, row, slot = [], 0, 0
    for start, count, looks_ahead in STEP:
        end = start + count
        keys, values = (
            stored[0][slot : slot + end].repeat_interleave(HEADS // KV_HEADS, 1)
            for stored in (cache.keys, cache.values)
        )
        places, own = torch.arange(end), torch.arange(start, end)[:, None]
        hidden = torch.zeros(count, end, dtype=torch.bool) if looks_ahead else places > own
        if window is not None:
            hidden = hidden | (places <= own - window)
        scores = torch.einsum("hqd,khd->hqk", query[:, row : row + count], keys) * DIM**-0.5
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", probs, values))
        row, slot = row + count, slot + -(-end // BLOCK_SIZE) * BLOCK_SIZE
    return torch.cat(outputs)


def kernel_of(kind: str):
    if kind == "gathered":
        return None
    if kind == "compiled":
        if compiled() is None:
            pytest.skip("Outrider was installed without a C++ compiler")
        return CpuAttention(BLOCK_SIZE)
    triton = pytest.importorskip("outrider.engine.kernels.paged_attention", reason="pip install triton")
    if torch.cuda.is_available():
        pytest.skip("tensors of a CPU are for Triton's interpreter")
    return triton.PagedAttention(BLOCK_SIZE, 96, 100_000, programs=6)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("kind", ["gathered", "compiled", "of Triton"])
@pytest.mark.parametrize("layout", ["as large as the step", "of a graph"])
@pytest.mark.parametrize("window", [None, 12])
def test_tokens_that_look_ahead_see_all_that_is_fed_with_them(
    kind: str, layout: str, window: int | None
) -> None:
    given, kernel = feeds(), kernel_of(kind)
    if kernel is None and layout == "of a graph":
        pytest.skip("graphs have kernels")
    tables = tables_for(given, BLOCK_SIZE)
    step = StepInput.of(tables, given)
    cache = KeyValues({0: (KV_HEADS, DIM, DIM)}, SLOTS // BLOCK_SIZE, BLOCK_SIZE, torch.float32, CPU)
    generator = torch.Generator().manual_seed(0)
    for stored in (cache.keys[0], cache.values[0]):
        stored.copy_(torch.randn(stored.shape, generator=generator))
    count = sum(tokens for _, tokens, _ in STEP)
    query = torch.randn(HEADS, count, DIM, generator=generator)
    if kernel is None:
        batch = pack(given, tables, torch.float32)
    else:
        padded = PagedLayout.padded(count, as_chains=True) if layout == "of a graph" else None
        paged = laid_out(step, tables, padded)
        batch = paged_batch(paged, paged.logit_rows, BLOCK_SIZE, torch.float32)
    found = attended(Paged(batch, cache, kernel), 0, query, scaling=None, window=window)
    torch.testing.assert_close(found, expected(query, cache, window), atol=2e-6, rtol=1e-5)


def test_step_that_looks_ahead_reaches_other_ranks_as_it_is() -> None:
    given = feeds()
    tables = tables_for(given, BLOCK_SIZE)
    step = StepInput.of(tables, given)
    received = StepInput.from_numbers(step.to_numbers(), tables_for(given, BLOCK_SIZE))
    assert [feed.looks_ahead for feed in received.feeds] == [looks_ahead for _, _, looks_ahead in STEP]
