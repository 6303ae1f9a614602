"""The device lays out the next position of a Draft as the host does; without a GPU in the interpreter."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.settings import Sampling
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.inputs.block_tables import BlockTables
from outrider.engine.inputs.choice_input import ChoiceInput
from outrider.engine.inputs.context_parts import SHORTEST
from outrider.engine.inputs.paged_input import PagedInput, PagedLayout
from outrider.engine.inputs.step_input import Feed, StepInput
from tests.support import paged_attention as support

kernels = pytest.importorskip("outrider.engine.kernels.advance", reason="needs triton: pip install triton")
choices = pytest.importorskip("outrider.engine.kernels.choice", reason="needs triton: pip install triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK, SPARE, ROWS, RANKS, POSITIONS = 4, 999, 8, 2, 3
BLOCKS = 2 * SHORTEST // BLOCK
TOKENS = [11, 12, 13, 14]  # best tokens of the first position
FED = [
    (5, 1),
    (SHORTEST + 30, 3),
    (7, 2),
    (SHORTEST + 1, 1),
]  # slots written, and tokens fed, of each sequence
ROWS_OF = [
    ChoiceContext(Sampling(temperature=0.5 + number, top_k=number, min_p=0.1), 2**63 + number, 9, (), ())
    for number in range(len(FED))
]


HELD = [HeldBlocks(np.random.default_rng(number).permutation(BLOCKS)) for number in range(len(FED))]
TABLES = BlockTables((len(FED), BLOCKS), BLOCK, SPARE, DEVICE)
TABLES.update(HELD[::-1])  # a sequence's row is not its place in the step
TABLES.on_device.copy_(torch.from_numpy(TABLES.on_host))


def laid_out(feeds: list[Feed], layout: PagedLayout | None = None) -> PagedInput[torch.Tensor]:
    return support.laid_out(StepInput.of(TABLES, feeds), TABLES, layout)


def feeds_of(positions: int, tokens: list[int]) -> list[Feed]:
    """Feeds of the first position, or of a later one, which feeds a token of each sequence."""
    feeds = []
    for number, (written, fed) in enumerate(FED):
        start = written + (fed + positions - 1 if positions else 0)
        of_feed = [tokens[number]] if positions else [3] * fed
        feeds.append(Feed(of_feed, 1, start, HELD[number], None))
    return feeds


def choice_of(rows: int, tokens: list[int], valid: list[bool]) -> Any:
    top_tokens = torch.zeros(rows, RANKS, dtype=torch.int32, device=DEVICE)
    top_tokens[: len(tokens), 0] = torch.tensor(tokens, dtype=torch.int32, device=DEVICE)
    are_valid = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    are_valid[: len(valid)] = torch.tensor(valid, device=DEVICE)
    return choices.DeviceChoice(top_tokens, torch.empty(0), are_valid, torch.empty(0))


def begun(positions: list[int]) -> Any:
    """Memory after the first position. positions: positions of each sequence."""
    first = laid_out(feeds_of(0, []))
    rows = ChoiceInput.of_rows(ROWS_OF, positions=positions).copied(DEVICE)
    memory = kernels.ChainMemory(
        laid_out([], PagedLayout.padded(ROWS, as_chains=False)),
        ChoiceInput.of_rows([ROWS_OF[0]] * ROWS).copied(DEVICE),
        torch.full((2, ROWS), -1, device=DEVICE),
        torch.full((POSITIONS, ROWS, RANKS + 1), -1, dtype=torch.int32, device=DEVICE),
    )
    are_finite = torch.ones(sum(fed for _, fed in FED), dtype=torch.bool, device=DEVICE)
    are_finite[2] = False  # a token of the second sequence
    kernels.begin(first, rows, are_finite, choice_of(4, TOKENS, [True] * 4), memory, BLOCK, SPARE)
    return memory


def advance(memory: Any, tokens: list[int], valid: list[bool]) -> None:
    finite = torch.ones(ROWS, dtype=torch.bool, device=DEVICE)
    kernels.advance(choice_of(ROWS, tokens, valid), finite, memory, BLOCK, SPARE)


def check(memory: Any, position: int, tokens: list[int]) -> None:
    """Compares what is fed next with the host's layout of the same feeds."""
    expected = laid_out(feeds_of(position, tokens), PagedLayout.padded(ROWS, as_chains=False))
    for name in ("token_ids", "position_ids", "slots", "seen", "work"):
        assert torch.equal(getattr(memory.paged, name), getattr(expected, name)), (name, position)
    count = len(FED)
    assert torch.equal(memory.paged.few_tiles[:count], expected.few_tiles[:count])
    assert not memory.paged.few_tiles[count:, 2].any(), "padding has no rows"
    packed = ChoiceInput.of_rows([replace(row, position=row.position + position) for row in ROWS_OF])
    assert memory.rows.integers[:4, :count].tolist() == packed.integers[:4].tolist()
    assert memory.rows.numbers[:, :count].tolist() == packed.numbers.tolist()


def test_next_positions_are_laid_out_as_the_host_lays_them_out() -> None:
    """Contexts are long and short, and some begin a block. Two rows are not valid, each at one position."""
    memory, tokens = begun([POSITIONS + 1] * len(FED)), TOKENS
    assert memory.found[0, :4].tolist() == [[11, 0, 1], [12, 0, 0], [13, 0, 1], [14, 0, 1]]
    check(memory, 1, tokens)
    for position in range(1, POSITIONS):
        tokens = [token + 10 for token in tokens]
        valid = [True, True, position != 1, True]
        advance(memory, tokens, valid)
        found = [[token, 0, int(is_valid)] for token, is_valid in zip(tokens, valid, strict=True)]
        assert memory.found[position, :4].tolist() == found
        assert (memory.found[position, 4:] == -1).all(), "padding finds nothing"
        check(memory, position + 1, tokens)


def test_sequence_with_fewer_positions_is_not_chosen_further_and_writes_nowhere() -> None:
    positions = [1, 3, 2, 1]
    memory = begun(positions)
    fed = [written + count for written, count in FED]
    for position in range(1, POSITIONS):
        are_done = [count <= position for count in positions]
        assert (memory.paged.slots[:4] == SPARE).tolist() == are_done
        known = [slots + min(position, count - 1) for slots, count in zip(fed, positions, strict=True)]
        assert memory.paged.seen[:4].tolist() == known
        assert memory.paged.position_ids[0, :4].tolist() == [slots - 1 for slots in known]
        ends = {int(tile[1]): int(tile[3]) for tile in memory.paged.few_tiles[:4]}
        assert [ends[row] for row in range(4)] == known
        advance(memory, [token + 10 * position for token in TOKENS], [True] * 4)
        assert (memory.found[position, :4, 0] == -1).tolist() == are_done
