"""Masks: who looks at what, against the rule spelled out token by token."""

import math
import random

import numpy as np
import pytest
import torch

from outrider.decoding.draft import ROOT, Draft
from outrider.engine.forward.attention_groups import AttentionGroup, QuerySpan, form_groups

CPU = torch.device("cpu")
BLOCK = 4


def span(first: int, count: int, start: int, tree: Draft | None = None) -> QuerySpan:
    return QuerySpan(np.arange(-(-(start + count) // BLOCK)), first, count, start, tree)


def groups_of(spans: list[QuerySpan]) -> list[AttentionGroup]:
    return form_groups(spans, BLOCK, torch.float32, CPU)


def sees(span: QuerySpan, query: int, slot: int, window: int | None) -> bool:
    """The rule: itself, what is committed before it, its drafted ancestors; no further than the window."""
    tree = span.tree or Draft()
    root = span.length - len(tree)
    own = span.start + query
    visible = slot - root in tree.path(own - root) if min(own, slot) >= root else slot <= own
    positions = [root + tree.depths[place - root] if place >= root else place for place in (own, slot)]
    return visible and (window is None or positions[0] - positions[1] < window)


def random_tree(rng: random.Random, nodes: int) -> Draft:
    parents = [rng.randrange(ROOT, node) if node else ROOT for node in range(nodes)]
    return Draft(tuple(range(nodes)), tuple(parents))


@pytest.mark.parametrize("window", [None, 1, 2, 5])
@pytest.mark.parametrize("seed", range(20))
def test_mask_follows_the_rule_for_chains_and_trees_at_any_level(seed: int, window: int | None) -> None:
    rng = random.Random(seed)
    spans, first = [], 0
    for _ in range(4):
        start, count = rng.randrange(9), rng.randrange(2, 9)
        nodes = rng.randrange(start + count)  # some may be pending from an earlier step
        tree = random_tree(rng, nodes) if nodes and rng.random() < 0.7 else None
        spans.append(span(first, count, start, tree))
        first += count
    (group,) = groups_of(spans)
    mask = group.mask(window, 2, CPU)
    assert mask is not None
    assert mask.shape == (4, 1, 2 * group.num_queries, group.length)
    for index, item in enumerate(spans):
        for query in range(item.count):
            for repeat in range(2):
                row = mask[index, 0, repeat * group.num_queries + query]
                expected = [
                    0.0 if slot < item.length and sees(item, query, slot, window) else -math.inf
                    for slot in range(group.length)
                ]
                assert row.tolist() == expected


def test_single_tokens_of_one_length_need_no_mask() -> None:
    (group,) = groups_of([span(0, 1, 7), span(1, 1, 7)])
    assert group.mask(None, 1, CPU) is None
    assert group.mask(8, 1, CPU) is None
    assert group.mask(7, 1, CPU) is not None


def test_single_node_does_not_see_its_siblings() -> None:
    """A branch that grows alone, beside others that are pending."""
    one = span(0, 1, 9, Draft((1, 2, 3), (ROOT, 0, ROOT)))
    (group,) = groups_of([one])
    mask = group.mask(None, 1, CPU)
    assert mask is not None
    assert (mask.flatten() == 0.0).tolist() == [sees(one, 0, slot, None) for slot in range(10)]
    assert not sees(one, 0, 8, None)


def test_lengths_far_apart_are_not_padded_to_each_other() -> None:
    groups = groups_of([span(0, 1, 10), span(1, 1, 3000), span(2, 1, 12)])
    assert [[item.start for item in group.spans] for group in groups] == [[3000], [10, 12]]


def test_long_prefills_are_alone_and_short_counts_together() -> None:
    groups = groups_of([span(0, 40, 0), span(40, 1, 9), span(41, 5, 9), span(46, 3, 9)])
    assert [[item.count for item in group.spans] for group in groups] == [[1], [5, 3], [40]]


def test_padded_queries_are_dropped_from_the_output() -> None:
    (group,) = groups_of([span(0, 5, 9), span(5, 3, 9)])
    assert group.real is not None
    assert group.real.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert group.output_rows == slice(0, 8)


def test_context_in_one_piece_is_read_without_a_copy() -> None:
    (group,) = groups_of([span(0, 1, 9)])
    assert group.view == slice(0, 10)
    assert group.blocks is None
    scattered = span(0, 1, 9)
    scattered.blocks[:3] = [4, 0, 2]
    (group,) = groups_of([scattered])
    assert group.view is None
    assert group.blocks is not None
    assert group.blocks.tolist() == [4, 0, 2]
