"""What rank 0 tells the others arrives as it was."""

import random

import numpy as np
import pytest
import torch

from outrider.decoding.draft import ROOT, Draft
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.held_state import StateUse
from outrider.engine.inputs.block_tables import BlockTables
from outrider.engine.inputs.step_input import Changes, Feed, ForeseenRounds, Move, StepInput, WindowedChanges


def random_step(rng: random.Random, tables: BlockTables) -> StepInput:
    moves, records, windowed_moves = (
        [Move(np.array(rng.sample(range(999), count)), np.arange(count)) for count in range(rng.randrange(4))]
        for _ in range(3)
    )
    feeds = []
    for _ in range(rng.randrange(1, 5)):
        count, nodes = rng.randrange(1, 9), rng.randrange(6)
        parents = tuple(rng.randrange(ROOT, node) if node else ROOT for node in range(nodes))
        tree = Draft(tuple(rng.sample(range(256), nodes)), parents) if nodes else None
        tokens = [rng.randrange(128_000) for _ in range(count)]
        blocks = HeldBlocks(rng.sample(range(999), rng.randrange(7)))
        feeds.append(Feed(tokens, rng.randrange(count), rng.randrange(99), blocks, tree))
    cleared, emptied = (np.array(rng.sample(range(999), rng.randrange(5)), np.int64) for _ in range(2))
    resumed, entered = (
        np.array([rng.sample(range(99), 2) for _ in range(rng.randrange(3))], np.int64).reshape(-1, 2)
        for _ in range(2)
    )
    windowed = WindowedChanges(entered, windowed_moves, emptied)
    uses = [random_use(rng) for _ in feeds] if rng.random() < 0.5 else []
    rounds = ForeseenRounds(rng.randrange(5), bool(rng.randrange(2)))
    return StepInput.of(tables, feeds, Changes(moves, cleared, records, resumed, windowed), uses, rounds)


def random_use(rng: random.Random) -> StateUse:
    first, written = rng.randrange(99), rng.randrange(99)
    ends = {rng.randrange(99): rng.randrange(9) for _ in range(rng.randrange(3))}
    read, write = (rng.choice([None, 0, 1]) for _ in range(2))
    return StateUse(rng.randrange(9), first, read, written, write, ends)


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


def lists_of(move: Move) -> tuple[list[int], list[int]]:
    return move.source.tolist(), move.target.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_step_is_read_as_it_was_written(seed: int) -> None:
    tables, others = (BlockTables((4, 6), 8, 0, torch.device("cpu")) for _ in range(2))
    step = random_step(random.Random(seed), tables)
    read = StepInput.from_numbers(step.to_numbers(), others)
    assert (others.on_host == tables.on_host).all()
    ours, theirs = step.changes, read.changes
    of_windows = ours.windowed.moves, theirs.windowed.moves
    for made, told in ((ours.moves, theirs.moves), (ours.records, theirs.records), of_windows):
        assert [lists_of(move) for move in told] == [lists_of(move) for move in made]
    assert theirs.cleared.tolist() == ours.cleared.tolist()
    assert theirs.resumed.tolist() == ours.resumed.tolist()
    assert theirs.windowed.blocks.tolist() == ours.windowed.blocks.tolist()
    assert theirs.windowed.cleared.tolist() == ours.windowed.cleared.tolist()
    assert (read.uses, read.rounds) == (step.uses, step.rounds)
    assert len(read.feeds) == len(step.feeds)
    for feed, other in zip(step.feeds, read.feeds, strict=True):
        assert (feed.tokens, feed.num_logits, feed.start) == (other.tokens, other.num_logits, other.start)
        assert (feed.row, feed.tree) == (other.row, other.tree)
