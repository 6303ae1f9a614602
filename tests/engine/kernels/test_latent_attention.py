"""Attention over cached latents, whose values are a part of their keys, says what plain arithmetic says."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.decoding.draft import ROOT, Draft
from outrider.engine.cache.narrow import NARROW, narrowed
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.inputs import paged_input as paged_input_module
from outrider.engine.inputs.context_parts import SHORTEST, third_length
from outrider.engine.inputs.paged_input import LINES_OF_LATENTS, WORK, PagedLayout, split_tiles_of
from outrider.engine.inputs.step_input import Feed
from tests.support.paged_attention import PlainAttention, moved, paged_input

kernels = pytest.importorskip("outrider.engine.kernels.paged_attention", reason="pip install triton")
interpreter = pytest.importorskip("triton.runtime.interpreter")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = 16
TREE = Draft((1, 2, 3, 4), (ROOT, 0, 0, 1))
STEP = [  # slots written before, tokens, tree
    (SHORTEST - 1, 1, None),
    (SHORTEST, 1, None),
    (2 * SHORTEST - 3, 6, TREE),
    (7, 3, TREE),
    (0, 66, None),
    (70, 33, None),
    (0, 1, None),
]
NUM_BLOCKS = 80
SPLIT = WORK.index("split_tiles")


def feeds_of(specs):
    order = np.random.default_rng(0).permutation(NUM_BLOCKS)
    feeds, taken = [], 0
    for start, count, tree in specs:
        blocks = order[taken : taken + -(-(start + count) // BLOCK)]
        taken += len(blocks)
        feeds.append(Feed([0] * count, 1, start, HeldBlocks(blocks), tree))
    return feeds


def attend(paged, query, cached, latent_dim, **rules):
    """Runs the kernels, on the GPU if there is one, with fewer programs than there is work."""
    attention = kernels.PagedAttention(BLOCK, third_length(2**17), 100_000, programs=6)
    query, cached = query.to(DEVICE), cached.to(DEVICE)
    values = cached[..., :latent_dim]
    return attention(moved(paged, DEVICE), query, cached, values, **rules).cpu()


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize(
    ("heads", "dims", "dtype", "cache_dtype"),
    [
        (4, (32, 16), torch.float32, torch.float32),
        (5, (48, 24), torch.float32, torch.float32),
        (20, (32, 32), torch.float32, NARROW),
        (3, (512, 64), torch.float16, torch.float16),
    ],
    ids=["a few heads", "sizes that are no powers of two", "narrow", "DeepSeek-V3's vectors"],
)
def test_single_tokens_chains_trees_and_prompts(heads, dims, dtype, cache_dtype):
    """bfloat16 products are wrong in Triton's interpreter, so that float16 stands for it."""
    given = paged_input(feeds_of(STEP), BLOCK)
    cached = narrowed(random(NUM_BLOCKS * BLOCK, 1, sum(dims), dtype=dtype), cache_dtype)
    query = random(len(given.slots), heads, sum(dims), dtype=dtype).transpose(0, 1)
    ours = attend(given, query, cached, dims[0], scaling=0.1)
    cached = cached.float()
    plain = PlainAttention(BLOCK)(given, query.float(), cached, cached[..., : dims[0]], scaling=0.1)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(ours.float(), plain, atol=tolerance, rtol=max(1e-5, tolerance))


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(("heads", "boundary"), [(5, SHORTEST), (16, SHORTEST), (5, 4096)])
def test_row_at_a_boundary_of_parts_is_the_same_alone_in_company_in_a_chain_and_in_a_chunk(
    monkeypatch, heads, boundary
):
    """Bit for bit, whether programs share its context or a program reads all of it."""
    count, start, dim = 6, boundary - 3, 32
    blocks = HeldBlocks(np.random.default_rng(0).permutation(start // BLOCK + 4))
    cached, query = random(len(blocks) * BLOCK, 1, dim + 16), random(24, heads, dim + 16)

    def rows(feeds, query, layout=None):
        given = paged_input(feeds, BLOCK, layout=layout)
        return given, attend(given, query.transpose(0, 1), cached, dim)

    chain = Feed([0] * count, 1, start, blocks, None)
    given, expected = rows([chain], query[:count])
    assert given.work[SPLIT] == 1, "programs share the context"
    plain = PlainAttention(BLOCK)(given, query[:count].transpose(0, 1), cached, cached[..., :dim])
    torch.testing.assert_close(expected, plain, atol=2e-6, rtol=1e-5)
    for place in range(count):
        _, alone = rows([Feed([0], 1, start + place, blocks, None)], query[place : place + 1])
        assert torch.equal(alone[0], expected[place]), place
    before = query.new_zeros(10, heads, dim + 16)
    chunk = Feed([0] * (10 + count), 1, start - 10, blocks, None)
    layout = replace(PagedLayout.padded(24, as_chains=True), lanes=1)
    _, in_chunk = rows([chunk], torch.cat([before, query[:count], before[:8]]), layout)
    assert torch.equal(in_chunk[10:16], expected)
    assert not in_chunk[16:].any(), "padding is 0"
    monkeypatch.setattr(paged_input_module, "SPLIT_TILES", 1)
    given, together = rows([chain, Feed([0] * 8, 1, 60, HeldBlocks(blocks[:]), None)], query[: count + 8])
    assert given.work[SPLIT] == 0, "a program reads all of a context"
    assert torch.equal(together[:count], expected)


def test_tile_for_whose_parts_there_is_no_memory_is_read_by_a_program(monkeypatch):
    """Bit for bit: there is memory for two split tiles, and the step has three."""
    heads, dim = 4, 16
    monkeypatch.setattr(paged_input_module, "SPLIT_HEADS_OF_LATENTS", 2 * heads)
    assert split_tiles_of(heads, caches_latents=True) == 2

    def feed(place):
        return Feed([0], 1, 2 * SHORTEST + place, HeldBlocks(range(20)), None)

    cached, query = random(20 * BLOCK, 1, 2 * dim), random(3, heads, 2 * dim)
    given = paged_input([feed(place) for place in range(3)], BLOCK)
    assert given.work[SPLIT] == 3
    together = attend(given, query.transpose(0, 1), cached, dim)
    for place in range(3):
        row = query[place : place + 1].transpose(0, 1)
        alone = attend(paged_input([feed(place)], BLOCK), row, cached, dim)
        assert torch.equal(alone[0], together[place]), place


def test_drafted_row_as_a_chain_is_what_it_is_when_it_is_committed():
    """Bit for bit: wherever its ancestors lie among other nodes, and whatever shares its tile."""
    heads, dim = 8, 32
    cached, query = random(NUM_BLOCKS * BLOCK, 1, dim + 16), random(6, heads, dim + 16)

    def attended(feed, rows):
        padded = query.new_zeros(16, heads, dim + 16)
        padded[: len(rows)] = query[rows]
        layout = replace(PagedLayout.padded(16, as_chains=True), lanes=1)
        given = paged_input([feed], BLOCK, layout=layout)
        return attend(given, padded.transpose(0, 1), cached, dim)[: len(rows)]

    (feed,) = feeds_of([(155, 6, Draft((1, 2, 3, 4, 5), (ROOT, ROOT, 1, 1, 3)))])
    drafted = attended(feed, [0, 1, 2, 3, 4, 5])
    kept = [0, 2, 4, 5]  # the committed token, and the nodes 1, 3, 4
    slots = feed.blocks[np.arange(161) // BLOCK] * BLOCK + np.arange(161) % BLOCK
    cached[slots[155:159]] = cached[slots[155 + np.array(kept)]]  # which lie where a chain's would
    assert torch.equal(attended(Feed([0] * 4, 1, 155, feed.blocks, None), kept), drafted[kept])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counts what the interpreter reads")
@pytest.mark.parametrize(("rows", "cuts"), [(1, 1), (3, 2)])
def test_each_cut_of_rows_and_heads_reads_each_vector_once(monkeypatch, rows, cuts):
    heads, dim, end = LINES_OF_LATENTS // 2, 32, SHORTEST + 70
    cached, query = random(20 * BLOCK, 1, dim + 16), random(rows, heads, dim + 16)
    first, last = cached.data_ptr(), cached.data_ptr() + cached.nbytes
    load, numbers_read = interpreter.InterpreterBuilder.create_masked_load, 0

    def counted(builder, pointers, mask, *options):
        nonlocal numbers_read
        at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        numbers_read += int(((at >= first) & (at < last)).sum())
        return load(builder, pointers, mask, *options)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", counted)
    feed = Feed([0] * rows, 1, end - rows, HeldBlocks(range(20)), None)
    attend(paged_input([feed], BLOCK), query.transpose(0, 1), cached, dim)
    assert numbers_read == cuts * end * (dim + 16)
