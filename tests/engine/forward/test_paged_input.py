"""What the paged kernels are told of a step is what the step's sequences say of themselves."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.decoding.draft import MAX_NODES, ROOT, Draft
from outrider.engine.forward.attention_groups import QuerySpan, form_groups
from outrider.engine.forward.batch import pack
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.inputs import paged_input as paged_input_module
from outrider.engine.inputs.context_parts import SHORTEST
from outrider.engine.inputs.paged_input import (
    FEW_QUERIES,
    FEW_TILE,
    MANY_TILE,
    WORD_BITS,
    PagedLayout,
)
from outrider.engine.inputs.step_buffer import buffer_size, split
from outrider.engine.inputs.step_input import Feed, StepInput
from tests.support.paged_attention import (
    PlainAttention,
    laid_out,
    paged_input,
    tables_for,
    visible_slots,
)

BLOCK = 8
CPU = torch.device("cpu")
TREE = Draft((1, 2, 3, 4, 5), (ROOT, 0, 0, 1, 2))
WIDE = Draft(tuple(range(100)), (ROOT,) * 100)
AS_CHAINS = PagedLayout.padded(16, as_chains=True)


def feeds_of(*specs: tuple[int, int, Draft | None]) -> list[Feed]:
    """Feeds from (slots written before, tokens, tree) each. A sequence's blocks are its own, in disorder."""
    order = np.random.default_rng(0).permutation(200)
    feeds, taken = [], 0
    for number, (start, count, tree) in enumerate(specs):
        blocks = order[taken : taken + -(-(start + count) // BLOCK) + 1]  # one that is reserved
        taken += len(blocks)
        tokens = list(range(number, number + count))
        feeds.append(Feed(tokens, min(count, 3), start, HeldBlocks(blocks), tree))
    return feeds


STEPS = {
    "single tokens": [(0, 1, None), (7, 1, None), (8, 1, None), (300, 1, None)],
    "chains": [(20, 5, None), (3, FEW_QUERIES, None), (40, 9, None)],
    "prompts": [(0, 3 * MANY_TILE + 1, None), (50, MANY_TILE, None), (11, FEW_QUERIES + 1, None)],
    "a tree": [(20, 6, TREE), (9, 1, None)],
    "a tree of which a part is fed": [(20, 2, TREE)],
    "a tree of several words, and a prompt": [(30, 101, WIDE), (5, 2, None), (0, 40, None)],
}


@pytest.mark.parametrize("specs", STEPS.values(), ids=STEPS)
def test_rows_tokens_places_and_masks(specs):
    feeds = feeds_of(*specs)
    tables = tables_for(feeds, BLOCK)
    given = laid_out(StepInput.of(tables, feeds), tables)
    batch = pack(feeds, tables, torch.float32)
    assert given.token_ids.tolist() == batch.token_ids.tolist()
    assert given.position_ids.tolist() == batch.position_ids.tolist()
    assert given.logit_rows.tolist() == batch.logit_rows.tolist()
    slots = torch.arange(200 * BLOCK)[batch.slots]
    assert given.slots.tolist() == slots.tolist()
    seen = {}
    for tile in torch.cat([given.few_tiles, given.many_tiles]).tolist():
        lane, first, count, end, _ = tile
        assert count <= (FEW_TILE if len(feeds[lane].tokens) <= FEW_QUERIES else MANY_TILE)
        assert end <= feeds[lane].start + len(feeds[lane].tokens)
        for row, visible in enumerate(visible_slots(given, tile, window=None)):
            assert first + row not in seen
            seen[first + row] = visible.nonzero().flatten().tolist()
    first = 0
    for feed in feeds:
        span = QuerySpan(feed.blocks[:], first, len(feed.tokens), feed.start, feed.tree)
        (group,) = form_groups([span], BLOCK, torch.float32, CPU)
        mask = group.mask(None, 1, CPU)
        for row in range(span.count):
            visible = torch.ones(span.length) if mask is None else mask[0, 0, row] == 0
            assert seen.pop(first + row) == visible.nonzero().flatten().tolist()
        first += span.count
    assert not seen


def test_fill_long_contexts_are_split_and_come_first(monkeypatch):
    """A context is long if it is more than the given part of all: here a third of 1,310 slots."""
    monkeypatch.setattr(paged_input_module, "SPLIT_TILES", 3)
    prompt = (0, FEW_QUERIES + 1, None)
    given = paged_input(feeds_of((200, 1, None), (600, 2, None), prompt, (506, 1, None)), BLOCK)
    assert [tile[0] for tile in given.few_tiles.tolist()] == [1, 3, 0]
    assert given.work.tolist() == [3, 2, 602, 4 + FEW_QUERIES + 1, 0]


def test_fill_context_of_a_single_part_is_not_split():
    given = paged_input(feeds_of((SHORTEST - 1, 1, None)), BLOCK)
    assert given.work.tolist() == [1, 0, 0, 1, 0]


def test_as_chains_a_node_off_the_chain_is_a_tile_that_reads_its_path():
    feeds = feeds_of((20, 7, TREE), (9, 2, None), (30, 3, Draft((1, 2, 3, 4), (ROOT, 0, 0, 2))))
    given = paged_input(feeds, BLOCK, layout=replace(AS_CHAINS, lanes=3))
    tiles = [tile for tile in given.few_tiles.tolist() if tile[2]]
    assert [tile[:3] for tile in tiles] == [
        [0, 0, 4],  # two committed tokens and two nodes of the chain
        [0, 4, 1],
        [0, 5, 1],
        [0, 6, 1],
        [1, 7, 2],
        [2, 9, 1],  # one of the nodes is pending
        [2, 10, 1],
        [2, 11, 1],
    ]
    assert given.position_ids[0, :12].tolist() == [20, 21, 22, 23, 23, 24, 24, 9, 10, 30, 30, 31]
    assert given.seen[:12].tolist() == (given.position_ids[0, :12] + 1).tolist()
    attend = PlainAttention(BLOCK)
    for row, tile in zip((4, 5, 6, 10, 11), [*tiles[1:4], *tiles[6:]], strict=True):
        feed = feeds[tile[0]]
        root = feed.start + len(feed.tokens) - len(feed.tree)
        node = feed.start + row - (0 if tile[0] == 0 else 9) - root
        places = np.array([*range(root), *(root + before for before in feed.tree.path(node))])
        expected = feed.blocks[places // BLOCK] * BLOCK + places % BLOCK
        assert attend.slots(given, tile).tolist() == expected.tolist()


def test_rest_of_a_larger_layout_is_padding_that_nobody_reads():
    feeds = feeds_of((20, 6, TREE), (9, 1, None))
    room = PagedLayout.padded(16, as_chains=False)
    assert room.words * WORD_BITS == MAX_NODES
    padded = paged_input(feeds, BLOCK, 999, replace(room, lanes=len(feeds)))
    exact = paged_input(feeds, BLOCK)
    for name in ("token_ids", "position_ids"):
        assert getattr(padded, name)[0, :7].tolist() == getattr(exact, name)[0].tolist()
        assert not getattr(padded, name)[0, 7:].any()
    assert padded.seen.tolist() == [*exact.seen.tolist(), *[0] * 9]
    assert padded.work.tolist() == exact.work.tolist()
    assert padded.slots.tolist() == [*exact.slots.tolist(), *[999] * 9]
    assert padded.few_tiles[:2].tolist() == exact.few_tiles.tolist()
    assert not padded.few_tiles[2:].any()
    assert padded.ancestors[:7, :1].tolist() == exact.ancestors.tolist()


def test_part_of_the_new_blocks_is_a_part_of_the_buffer():
    """So that no more of it has to be copied to the device."""
    room = PagedLayout(16, 16, 16, 50, 1, 16, 0)
    buffer = torch.arange(buffer_size(room.fields) // 8).view(torch.uint8)
    part = replace(room, new_blocks=3).fields
    for name, own in split(part, buffer[: buffer_size(part)]).items():
        whole = split(room.fields, buffer)[name]
        assert own.tolist() == whole[: len(own)].tolist()
