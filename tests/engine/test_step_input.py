"""What rank 0 tells the others arrives as it was."""

import random

import numpy as np
import pytest

from outrider.decoding.draft import ROOT, Draft
from outrider.engine.inputs.step_input import Feed, Move, StepInput


def random_step(rng: random.Random) -> StepInput:
    moves = [
        Move(np.array(rng.sample(range(999), count)), np.arange(count)) for count in range(rng.randrange(4))
    ]
    feeds = []
    for _ in range(rng.randrange(1, 5)):
        count, nodes = rng.randrange(1, 9), rng.randrange(6)
        parents = tuple(rng.randrange(ROOT, node) if node else ROOT for node in range(nodes))
        tree = Draft(tuple(rng.sample(range(256), nodes)), parents) if nodes else None
        tokens = [rng.randrange(128_000) for _ in range(count)]
        feeds.append(Feed(tokens, rng.randrange(count), rng.randrange(99), np.arange(rng.randrange(7)), tree))
    return StepInput(moves, np.array(rng.sample(range(999), rng.randrange(5)), np.int64), feeds)


@pytest.mark.parametrize("seed", range(20))
def test_step_is_read_as_it_was_written(seed: int) -> None:
    step = random_step(random.Random(seed))
    read = StepInput.from_numbers(step.to_numbers())
    assert len(read.moves) == len(step.moves)
    for ours, theirs in zip(step.moves, read.moves, strict=True):
        assert (ours.source == theirs.source).all()
        assert (ours.target == theirs.target).all()
    assert read.cleared.tolist() == step.cleared.tolist()
    assert len(read.feeds) == len(step.feeds)
    for feed, other in zip(step.feeds, read.feeds, strict=True):
        assert (feed.tokens, feed.num_logits, feed.start) == (other.tokens, other.num_logits, other.start)
        assert (feed.blocks.tolist(), feed.tree) == (other.blocks.tolist(), other.tree)
