"""The kernels of attention say what plain arithmetic says.

Those of Triton are interpreted where there is no GPU; the compiled one is for a CPU.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.draft import ROOT, Draft
from outrider.engine.cache.narrow import NARROW, narrowed
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.inputs import paged_input as paged_input_module
from outrider.engine.inputs.context_parts import parts_of, third_length
from outrider.engine.inputs.paged_input import PagedInput, PagedLayout
from outrider.engine.inputs.step_input import Feed
from outrider.engine.kernels.cpu.attention import CpuAttention
from outrider.engine.kernels.cpu.functions import compiled
from tests.support.functions import needs_functions
from tests.support.paged_attention import PlainAttention, paged_input

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHARED_MEMORY = 100_000
TREE = Draft((1, 2, 3, 4), (ROOT, 0, 0, 1))
WIDE = Draft(tuple(range(70)), (ROOT,) * 70)  # its masks take two words; the last nodes are fed
STEP = [  # slots written before, tokens, tree
    (50, 1, None),
    (33, 5, None),
    (7, 3, TREE),
    (200, 6, TREE),
    (0, 70, None),
    (150, 33, None),
    (0, 1, None),
    (100, 4, WIDE),
]
NUM_BLOCKS = 120


def feeds_of(specs, block_size):
    order = np.random.default_rng(0).permutation(NUM_BLOCKS)
    feeds, taken = [], 0
    for start, count, tree in specs:
        blocks = order[taken : taken + -(-(start + count) // block_size)]
        taken += len(blocks)
        feeds.append(Feed([0] * count, 1, start, HeldBlocks(blocks), tree))
    return feeds


def of_triton(block_size):
    """Attention with fewer programs than there is work: some programs take several pieces."""
    triton = pytest.importorskip("outrider.engine.kernels.paged_attention", reason="pip install triton")
    kernels = triton.PagedAttention(block_size, third_length(2**17), SHARED_MEMORY, programs=6)
    return partial(attended, kernels)


def of_cpu(block_size):
    if compiled() is None:
        pytest.skip("Outrider was installed without a C++ compiler")
    return CpuAttention(block_size)


KERNELS = pytest.mark.parametrize("attention", [of_triton, of_cpu])


def attended(kernels, paged, query, keys, values, *, sinks=None, windowed=None, **rules):
    """Runs the kernels, on the GPU if there is one; returns the result on the CPU."""
    query, keys, values = (tensor.to(DEVICE) for tensor in (query, keys, values))
    paged = PagedInput(**{name: numbers.to(DEVICE) for name, numbers in vars(paged).items()})
    sinks = None if sinks is None else sinks.to(DEVICE)
    windowed = None if windowed is None else windowed.to(DEVICE)
    return kernels(paged, query, keys, values, sinks=sinks, windowed=windowed, **rules).cpu()


def compared(attention, heads, kv_heads, dims, block_size, dtype, specs=STEP, cache_dtype=None, **rules):
    """What the kernels give, and what plain arithmetic does, float32."""
    generator = torch.Generator().manual_seed(0)
    key_dim, value_dim = dims

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    keys = narrowed(random(NUM_BLOCKS * block_size, kv_heads, key_dim), cache_dtype)
    values = narrowed(random(NUM_BLOCKS * block_size, kv_heads, value_dim), cache_dtype)
    given = paged_input(feeds_of(specs, block_size), block_size)
    query = random(len(given.slots), heads, key_dim).transpose(0, 1)
    if rules.pop("with_sinks", False):
        rules["sinks"] = random(heads)
    ours = attention(block_size)(given, query, keys, values, **rules)
    plain = PlainAttention(block_size)(given, query.float(), keys.float(), values.float(), **rules)
    return ours.float(), plain


@KERNELS
@pytest.mark.parametrize("case", ["groups of query heads", "a window shorter than a block"])
def test_numbers_of_a_narrow_cache_are_widened(attention, case):
    heads, kv_heads, dims, block_size, rules = CASES[case]
    rules = {**rules, "cache_dtype": NARROW}
    ours, plain = compared(attention, heads, kv_heads, dims, block_size, torch.float32, **rules)
    torch.testing.assert_close(ours, plain, atol=2e-6, rtol=1e-5)


CASES = {
    "groups of query heads": (8, 2, (32, 32), 16, {}),
    "as many key/value heads, and a window": (4, 4, (16, 16), 8, {"window": 30}),
    "sizes that are no powers of two, soft-capped, with sinks": (
        6,
        1,
        (48, 80),
        16,
        {"softcap": 2.0, "with_sinks": True, "scaling": 0.3},
    ),
    "scores far beyond the bound they are capped to": (4, 2, (16, 16), 8, {"softcap": 2.0, "scaling": 50.0}),
    "a window shorter than a block": (2, 2, (16, 16), 16, {"window": 10, "with_sinks": True}),
    "more query heads than are computed together": (16, 1, (16, 16), 4, {"specs": STEP[:3] + STEP[5:]}),
}


@KERNELS
@pytest.mark.parametrize(("heads", "kv_heads", "dims", "block_size", "rules"), CASES.values(), ids=CASES)
def test_single_tokens_chains_trees_and_prompts(attention, heads, kv_heads, dims, block_size, rules):
    ours, plain = compared(attention, heads, kv_heads, dims, block_size, torch.float32, **rules)
    # A score's rounding grows with its scale, and so does what it moves: 2.6e-6 were seen with SSE 4.1 at 50.
    atol = 1e-5 if rules.get("scaling", 0.0) > 1.0 else 2e-6
    torch.testing.assert_close(ours, plain, atol=atol, rtol=1e-5)


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize("window", [10, 30])
def test_layer_with_a_pool_for_windows_reads_only_blocks_that_a_window_reaches(attention, window, dtype):
    """All other blocks of the pool hold NaN."""
    block_size, heads, dim = 8, 2, 16
    feeds, generator = feeds_of(STEP, block_size), torch.Generator().manual_seed(0)
    given = paged_input(feeds, block_size)
    size = NUM_BLOCKS, block_size, heads, dim
    keys, values = (narrowed(torch.randn(*size, generator=generator), dtype) for _ in range(2))
    query = torch.randn(heads, len(given.slots), dim, generator=generator)
    whole = [stored.float().flatten(0, 1) for stored in (keys, values)]
    expected = PlainAttention(block_size)(given, query, *whole, window=window)
    windowed = torch.randperm(NUM_BLOCKS, generator=generator)
    pool = [torch.full_like(stored, float("nan")) for stored in (keys, values)]
    for feed in feeds:
        length = feed.start + len(feed.tokens)
        root = length - (len(feed.tree) if feed.tree else 0)
        for place in range(
            max(0, min(feed.start, root) - window + 1) // block_size, -(-length // block_size)
        ):
            block = feed.blocks[place]
            for stored, own in zip(pool, (keys, values), strict=True):
                stored[windowed[block]] = own[block]
    pool = [stored.flatten(0, 1) for stored in pool]
    ours = attention(block_size)(given, query, *pool, window=window, windowed=windowed)
    torch.testing.assert_close(ours, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("attention", "dtype"), [(of_triton, torch.float16), (of_cpu, torch.bfloat16)])
def test_half_precision(attention, dtype):
    """bfloat16 products are wrong in Triton's interpreter."""
    ours, plain = compared(attention, 8, 2, (64, 64), 16, dtype)
    plain = plain.to(dtype).float()
    torch.testing.assert_close(ours, plain, atol=2e-3, rtol=2e-3)


@needs_functions
def test_cpu_rounds_means_of_two_values_to_bfloat16_as_torch_does():
    """Equal keys give equal weights, and every other mean lies between two numbers: ties go to the even."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.zeros(16, 1, 16), torch.rand(16, 1, 4096, generator=generator)
    values[0, 0, 0] = torch.nan
    given = paged_input([Feed([0], 1, 1, HeldBlocks([0]), None)], 16)
    keys, values = keys.bfloat16(), values.bfloat16()
    output = CpuAttention(16)(given, keys[:1], keys, values)
    expected = values[:2, 0].float().mean(0).bfloat16()
    torch.testing.assert_close(output[0, 0], expected, atol=0, rtol=0, equal_nan=True)


@KERNELS
def test_attention_of_a_row_does_not_depend_on_other_rows(attention):
    """Bit for bit: not on other sequences, nor on what else its own feeds."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(NUM_BLOCKS * 16, 2, 16, generator=generator) for _ in range(2))
    query = torch.randn(30, 4, 16, generator=generator)
    attend = attention(16)
    feeds = feeds_of([(300, 9, None), (70, 1, None), (0, 20, None)], 16)
    together = attend(paged_input(feeds, 16), query.transpose(0, 1), keys, values)
    alone = attend(paged_input(feeds[:1], 16), query[:9].transpose(0, 1), keys, values)
    assert torch.equal(together[:9], alone)
    for place in range(9):
        single = Feed([0], 1, 300 + place, feeds[0].blocks, None)
        row = query[place : place + 1].transpose(0, 1)
        assert torch.equal(attend(paged_input([single], 16), row, keys, values)[0], together[place])


SPLIT_TILES = paged_input_module.WORK.index("split_tiles")
BOUNDARIES = (128, 4096, 20_480)  # slots after which parts of another length begin, but for the first


def with_long_context(slots):
    """Keys and values of few numbers, and a random query of 24 rows."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(slots, 1, 16, generator=generator) for _ in range(2))
    return keys, values, torch.randn(24, 2, 16, generator=generator)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("boundary", [*BOUNDARIES[:2], pytest.param(BOUNDARIES[2], marks=pytest.mark.slow)])
def test_triton_row_at_a_boundary_of_parts_is_the_same_alone_in_company_in_a_chain_and_in_a_chunk(
    monkeypatch, boundary
):
    """Bit for bit, whether programs share its context or a program reads all of it."""
    count, start = 6, boundary - 3
    blocks = HeldBlocks(np.random.default_rng(0).permutation(start // 16 + 4))
    keys, values, query = with_long_context(len(blocks) * 16)
    attend = of_triton(16)

    def rows(feeds, query, layout=None):
        given = paged_input(feeds, 16, layout=layout)
        return given, attend(given, query.transpose(0, 1), keys, values)

    chain = Feed([0] * count, 1, start, blocks, None)
    given, expected = rows([chain], query[:count])
    assert given.work[SPLIT_TILES] == 1, "programs share the context"
    plain = PlainAttention(16)(given, query[:count].transpose(0, 1), keys, values)
    torch.testing.assert_close(expected, plain, atol=2e-6, rtol=1e-5)
    for place in range(count):
        single = Feed([0], 1, start + place, blocks, None)
        _, alone = rows([single], query[place : place + 1])
        assert torch.equal(alone[0], expected[place]), place
    before = query.new_zeros(10, 2, 16)
    chunk = Feed([0] * (10 + count), 1, start - 10, blocks, None)
    chunk_layout = replace(PagedLayout.padded(24, as_chains=True), lanes=1)
    _, in_chunk = rows([chunk], torch.cat([before, query[:count], before[:8]]), chunk_layout)
    assert torch.equal(in_chunk[10:16], expected)
    assert not in_chunk[16:].any()
    monkeypatch.setattr(paged_input_module, "SPLIT_TILES", 1)
    company = Feed([0] * 8, 1, 60, HeldBlocks(blocks[:]), None)
    given, together = rows([chain, company], query[: count + 8])
    assert given.work[SPLIT_TILES] == 0, "a program reads all of a context"
    assert torch.equal(together[:count], expected)


@pytest.mark.parametrize("split_tiles", [1, 64])
def test_triton_node_of_a_tree_at_a_boundary_of_parts_is_what_it_is_when_it_is_committed(
    monkeypatch, split_tiles
):
    """Bit for bit: the node 2 is the child of the root."""
    monkeypatch.setattr(paged_input_module, "SPLIT_TILES", split_tiles)
    keys, values, query = with_long_context(4128)
    attend, blocks = of_triton(16), HeldBlocks(range(258))
    layout = replace(PagedLayout.padded(8, as_chains=True), lanes=1)

    def rows(feed, query):
        padded = torch.cat([query, query.new_zeros(8 - len(query), 2, 16)])
        given = paged_input([feed], 16, layout=layout)
        return attend(given, padded.transpose(0, 1), keys, values)[: len(query)]

    tree = Draft((1, 2, 3), (ROOT, 0, ROOT))
    drafted = rows(Feed([0] * 4, 1, 4094, blocks, tree), query[:4])
    keys[4095], values[4095] = keys[4097].clone(), values[4097].clone()
    committed = rows(Feed([0] * 2, 1, 4094, blocks, None), query[[0, 3]])
    assert torch.equal(committed, drafted[[0, 3]])


PROCESSORS = 132  # processors of an H100
SHARES = {"8B": (32, 8, 128), "1B": (32, 8, 64), "rank of four with a 70B": (16, 2, 128)}


@pytest.mark.parametrize("context", [4096, 8192, 20_480, 32_768, 131_071])  # tokens before the query's own
@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
def test_triton_one_sequence_gives_every_processor_work(monkeypatch, share, context):
    heads, kv_heads, dim = share
    triton = pytest.importorskip("outrider.engine.kernels.paged_attention", reason="pip install triton")
    grids = []
    monkeypatch.setattr(triton, "attend_tile", Recorder(grids))
    monkeypatch.setattr(triton, "join_parts", Recorder([]))
    third = third_length(131_072)
    attend = triton.PagedAttention(16, third, SHARED_MEMORY, programs=2 * PROCESSORS)
    feed = Feed([0], 1, context, HeldBlocks([0] * 8192), None)
    keys = torch.empty(16, kv_heads, dim)
    attend(paged_input([feed], 16), torch.empty(heads, 1, dim), keys, keys)
    ((programs, head_groups),) = grids
    assert min(programs, parts_of(context + 1, third)) * head_groups >= PROCESSORS


class Recorder:
    """Stands for a kernel: keeps the grids with which it is launched."""

    def __init__(self, grids):
        self.grids = grids

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *_, **__: None


@pytest.mark.parametrize("window", [None, 40])
@KERNELS
def test_as_chains_a_drafted_row_is_what_it_is_when_it_is_committed(attention, window):
    """Bit for bit: wherever its ancestors lie among other nodes, and whatever shares its tile."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(NUM_BLOCKS * 16, 2, 16, generator=generator) for _ in range(2))
    query = torch.randn(6, 4, 16, generator=generator)
    attend = attention(16)
    room = PagedLayout.padded(16, as_chains=True)

    def attended(feed, rows):
        layout = replace(room, lanes=1)
        padded = query.new_zeros(16, 4, 16)
        padded[: len(rows)] = query[rows]
        given = paged_input([feed], 16, layout=layout)
        return attend(given, padded.transpose(0, 1), keys, values, window=window)[: len(rows)]

    (feed,) = feeds_of([(155, 6, Draft((1, 2, 3, 4, 5), (ROOT, ROOT, 1, 1, 3)))], 16)
    drafted = attended(feed, [0, 1, 2, 3, 4, 5])
    kept = [0, 2, 4, 5]  # the committed token, and the nodes 1, 3, 4
    slots = feed.blocks[np.arange(161) // 16] * 16 + np.arange(161) % 16
    for tensor in (keys, values):
        tensor[slots[155:159]] = tensor[slots[155 + np.array(kept)]]  # which lie where a chain's would
    committed = Feed([0] * 4, 1, 155, feed.blocks, None)
    assert torch.equal(attended(committed, kept), drafted[kept])


@st.composite
def trees(draw):
    count = draw(st.integers(1, 8))
    return Draft(tuple(range(count)), tuple(draw(st.integers(ROOT, node - 1)) for node in range(count)))


@needs_functions
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, NARROW)],
    ids=str,
)
@settings(max_examples=50, deadline=None)
@given(tree=trees(), start=st.integers(0, 90), window=st.sampled_from([None, 12]), beside=st.integers(0, 40))
def test_cpu_row_is_the_same_alone_in_a_batch_padded_and_in_a_tree(
    dtype, cache_dtype, tree, start, window, beside
):
    """Bit for bit, in either layout of a tree."""
    generator = torch.Generator().manual_seed(start)
    path_blocks = HeldBlocks(range(NUM_BLOCKS, NUM_BLOCKS + 16))  # blocks beside those of the sequences
    slots = (NUM_BLOCKS + 16) * 8
    keys, values = (torch.randn(slots, 2, 32, generator=generator).to(cache_dtype) for _ in range(2))
    feed, *others = feeds_of([(start, 1 + len(tree), tree), *[(beside, 3, None)] * (beside > 0)], 8)
    count, attend = 1 + len(tree), CpuAttention(8)
    query = torch.randn(16, 4, 32, generator=generator).to(dtype)

    def rows(feeds, query, layout=None):
        given = paged_input(feeds, 8, layout=layout)
        return attend(given, query.transpose(0, 1), keys, values, window=window)

    padded = rows([feed], query, replace(PagedLayout.padded(16, as_chains=True), lanes=1))
    assert not padded[count:].any()
    together = rows([feed, *others], query[: count + 3 * len(others)])
    assert torch.equal(together[:count], padded[:count])
    for node in range(len(tree)):
        path = tree.path(node)
        places = np.array([*range(start + 1), *(start + 1 + ancestor for ancestor in path)])
        held = feed.blocks[places // 8] * 8 + places % 8
        for tensor in (keys, values):
            tensor[path_blocks[0] * 8 : path_blocks[0] * 8 + len(places)] = tensor[held]
        single = Feed([0], 1, len(places) - 1, path_blocks, None)
        assert torch.equal(rows([single], query[1 + node : 2 + node])[0], padded[1 + node])


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the interpreter
@KERNELS
def test_attention_keeps_numbers_that_are_not_finite_with_their_sequence(attention):
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(NUM_BLOCKS * 16, 2, 16, generator=generator) for _ in range(2))
    feeds = feeds_of([(40, 3, None), (70, 2, None)], 16)
    keys[int(feeds[0].blocks[1]) * 16 + 3] = torch.nan
    query = torch.randn(5, 4, 16, generator=generator).transpose(0, 1)
    output = attention(16)(paged_input(feeds, 16), query, keys, values)
    assert output[:3].isnan().all()
    assert output[3:].isfinite().all()
