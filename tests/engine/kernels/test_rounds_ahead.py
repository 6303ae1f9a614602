"""The kernel moves rounds behind their Verdicts; without a GPU it runs in the interpreter.

What it makes of a step that was laid out as if nothing was accepted is what the host lays out afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.decoding.draft import ROOT, Draft
from outrider.decoding.settings import Sampling
from outrider.engine.forward.batch import feed_chosen
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.inputs.block_tables import BlockTables
from outrider.engine.inputs.choice_input import ChoiceInput, PackedRows
from outrider.engine.inputs.context_parts import SHORTEST
from outrider.engine.inputs.paged_input import PagedInput, PagedLayout, fill
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.inputs.told_tokens import TOLD
from outrider.engine.sequence import EngineSequence

rounds_ahead = pytest.importorskip(
    "outrider.engine.kernels.rounds_ahead", reason="needs triton: pip install triton"
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK, BLOCKS = 8, 40  # slots of a block, blocks of a sequence
LAST = 9  # last token of every Verdict
FORK = Draft((5, 6, 7, 8), (ROOT, 0, 1, 0))
DEEP = Draft((*range(20, 34), 50, 51), (*range(ROOT, 13), 2, 5))  # rows of several tiles


@dataclass(frozen=True)
class Round:
    """A Draft to verify after a Verdict."""

    start: int  # tokens of the sequence before the Verdict
    draft: Draft
    accepted: int
    node: int  # last accepted node of the Draft before


class Steps:
    """Lays out steps of some sequences, whose blocks the device knows."""

    def __init__(self, count: int) -> None:
        blocks = np.random.default_rng(1).permutation(count * BLOCKS)
        self._held = [HeldBlocks() for _ in range(count)]
        for number, held in enumerate(self._held):
            held.push(blocks[number * BLOCKS :][:BLOCKS])
        self._tables = BlockTables((count + 2, BLOCKS), BLOCK, count * BLOCKS * BLOCK, DEVICE)
        self._tables.on_device.copy_(torch.from_numpy(self._tables.on_host))
        self._tables.update(self._held)
        self._tables.on_device.copy_(torch.from_numpy(self._tables.on_host))
        sampling = Sampling(max_tokens=900)
        self._sequences = [
            EngineSequence(number, 1, number, sampling, frozenset(), 999) for number in range(count)
        ]

    def laid_out(
        self, tokens: Sequence[list[int]], starts: Sequence[int], trees: Sequence[Draft]
    ) -> tuple[PagedInput[Tensor], PackedRows]:
        feeds = [
            Feed(fed, len(fed), start, held, None if tree.is_chain else tree)
            for fed, start, held, tree in zip(tokens, starts, self._held, trees, strict=False)
        ]
        step, counts = StepInput.of(self._tables, feeds), [len(fed) for fed in tokens]
        choice = ChoiceInput.of_feeds(feeds, self._sequences[: len(feeds)], counts, trees)
        fields = fill(PagedLayout.of(step), step, self._tables, choice).sent()
        return PagedInput.of(fields, self._tables.on_device), choice.at(fields)

    def slot(self, number: int, place: int) -> int:
        return int(self._held[number][place // BLOCK]) * BLOCK + place % BLOCK


ROUNDS = {
    "nothing accepted": [Round(3, Draft.chain((4, 5)), 0, ROOT)],
    "chain": [Round(6, Draft.chain((4, 5)), 2, 1)],
    "tree": [Round(7, FORK, 3, 2), Round(30, FORK, 1, 0)],
    "node off the chain": [Round(7, Draft.chain((4,)), 2, 6), Round(15, FORK, 1, 3)],
    "several tiles": [Round(9, DEEP, 4, 3), Round(60, Draft.chain((4,)), 3, 2)],
    "split context": [Round(SHORTEST + 5, FORK, 3, 2), Round(4, FORK, 0, ROOT)],
}


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("company", [0, 1])
def test_moved_rounds_are_laid_out_as_the_host_lays_them_out(name: str, company: int) -> None:
    """company: sequences behind the rounds, which stay in their places."""
    rounds, steps = ROUNDS[name], Steps(len(ROUNDS[name]) + company)
    others = [[LAST]] * company
    trees = [*(each.draft for each in rounds), *[Draft()] * company]
    told = [number for each in rounds for number in (LAST, each.accepted, each.node)]
    found = [token for each in rounds for token in each.draft.tokens]
    first, places = len(told), list[list[int]]()
    for number, each in enumerate(rounds):
        places.append([number * len(TOLD), *range(first, first + len(each.draft))])
        first += len(each.draft)
    starts = [each.start for each in rounds]
    unknown = [Draft((0,) * len(tree), tree.parents) if tree.is_chain else tree for tree in trees]
    paged, choice = steps.laid_out([*places, *[[0]] * company], [*starts, *[11] * company], unknown)
    chosen = torch.tensor([*told, *found], dtype=torch.int32, device=DEVICE)
    feed_chosen(paged.token_ids, chosen)
    moves = rounds_ahead.move_behind_verdicts(paged, choice, chosen[: len(told)], BLOCK)

    tokens = [[LAST, *each.draft.tokens] for each in rounds]
    moved_starts = [each.start + each.accepted for each in rounds]
    expected, of_choice = steps.laid_out([*tokens, *others], [*moved_starts, *[11] * company], trees)
    for field in PagedInput.__dataclass_fields__:
        assert torch.equal(getattr(paged, field), getattr(expected, field)), field
    assert torch.equal(choice.integers, of_choice.integers)
    nodes = of_choice.drafts[0] >= 0
    assert torch.equal(choice.drafts[0], of_choice.drafts[0])
    assert torch.equal(choice.drafts[1][nodes], of_choice.drafts[1][nodes])
    assert moves.tolist() == [
        [steps.slot(number, each.start + each.node) for number, each in enumerate(rounds)],
        [steps.slot(number, each.start + each.accepted - 1) for number, each in enumerate(rounds)],
    ]


def test_ranks_that_choose_nothing_move_rows_alone() -> None:
    steps, chain = Steps(1), Draft.chain((4, 5))
    paged, _ = steps.laid_out([[9, 4, 5]], [6], [chain])
    told = torch.tensor([9, 2, 1], dtype=torch.int32, device=DEVICE)
    rounds_ahead.move_behind_verdicts(paged, None, told, BLOCK)
    expected, _ = steps.laid_out([[9, 4, 5]], [8], [chain])
    assert torch.equal(paged.position_ids, expected.position_ids)
    assert torch.equal(paged.slots, expected.slots)
