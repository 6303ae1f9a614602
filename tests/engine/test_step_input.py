"""What rank 0 tells the others arrives as it was."""

import random

import numpy as np
import pytest
import torch

from outrider.decoding.draft import ROOT, Draft
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.inputs.block_tables import BlockTables
from outrider.engine.inputs.step_input import Feed, ForeseenRounds, Move, StepInput


def random_step(rng: random.Random, tables: BlockTables) -> StepInput:
    moves = [
        Move(np.array(rng.sample(range(999), count)), np.arange(count)) for count in range(rng.randrange(4))
    ]
    feeds = []
    for _ in range(rng.randrange(1, 5)):
        count, nodes = rng.randrange(1, 9), rng.randrange(6)
        parents = tuple(rng.randrange(ROOT, node) if node else ROOT for node in range(nodes))
        tree = Draft(tuple(rng.sample(range(256), nodes)), parents) if nodes else None
        tokens = [rng.randrange(128_000) for _ in range(count)]
        blocks = HeldBlocks(rng.sample(range(999), rng.randrange(7)))
        feeds.append(Feed(tokens, rng.randrange(count), rng.randrange(99), blocks, tree))
    cleared = np.array(rng.sample(range(999), rng.randrange(5)), np.int64)
    rounds = ForeseenRounds(rng.randrange(5), bool(rng.randrange(2)))
    return StepInput.of(tables, feeds, moves, cleared, rounds)


def test_step_of_64_sequences_at_32k_tells_a_rank_kilobytes() -> None:
    """Whole lists of blocks were a megabyte. Each fifth sequence begins a block here."""
    tables = BlockTables((64, 2112), 16, 0, torch.device("cpu"))
    held = [HeldBlocks(range(2048)) for _ in range(64)]
    tables.update(held)
    for blocks in held[::5]:
        blocks.push([2048])
    step = StepInput.of(tables, [Feed([7] * 5, 5, 32_766, blocks, None) for blocks in held])
    assert len(step.new_blocks) == 13
    assert step.to_numbers().nbytes < 8 * 1024


@pytest.mark.parametrize("seed", range(20))
def test_step_is_read_as_it_was_written(seed: int) -> None:
    tables, others = (BlockTables((4, 6), 8, 0, torch.device("cpu")) for _ in range(2))
    step = random_step(random.Random(seed), tables)
    read = StepInput.from_numbers(step.to_numbers(), others)
    assert (others.on_host == tables.on_host).all()
    assert len(read.moves) == len(step.moves)
    for ours, theirs in zip(step.moves, read.moves, strict=True):
        assert (ours.source == theirs.source).all()
        assert (ours.target == theirs.target).all()
    assert read.cleared.tolist() == step.cleared.tolist()
    assert read.rounds == step.rounds
    assert len(read.feeds) == len(step.feeds)
    for feed, other in zip(step.feeds, read.feeds, strict=True):
        assert (feed.tokens, feed.num_logits, feed.start) == (other.tokens, other.num_logits, other.start)
        assert (feed.row, feed.tree) == (other.row, other.tree)
