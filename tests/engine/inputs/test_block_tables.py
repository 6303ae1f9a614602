"""Block tables: each sequence keeps its row, and only what is new in it is told."""

import random

import numpy as np
import pytest
import torch

from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.inputs.block_tables import BlockTables
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.parallel.rank_group import together

CPU = torch.device("cpu")


def tables_of(rows: int = 3, blocks: int = 8) -> BlockTables:
    return BlockTables((rows, blocks), block_size=4, spare_slot=0, device=CPU)


def test_update_of_a_new_sequence_tells_all_its_blocks() -> None:
    tables, held = tables_of(), HeldBlocks([7, 5, 9])
    assert tables.update([held]).tolist() == [[0, 7], [1, 5], [2, 9]]
    assert held.row == 0
    assert tables.on_device[0, :3].tolist() == [7, 5, 9]


def test_update_of_a_sequence_that_grew_tells_what_is_new() -> None:
    tables, held, other = tables_of(), HeldBlocks([7, 5]), HeldBlocks([1])
    tables.update([held, other])
    held.push([6])
    assert tables.update([other, held]).tolist() == [[2, 6]]
    assert len(tables.update([held, other])) == 0


def test_update_of_a_sequence_whose_blocks_were_replaced_tells_the_replacements() -> None:
    tables, held = tables_of(), HeldBlocks([7, 5, 9])
    tables.update([held])
    assert held.drop(1) == [5, 9]
    held.push([2, 3, 4])
    assert tables.update([held]).tolist() == [[1, 2], [2, 3], [3, 4]]


def test_update_gives_a_row_of_no_sequence_to_another() -> None:
    tables, first, second = tables_of(), HeldBlocks([1]), HeldBlocks([2])
    tables.update([first, second])
    first.drop(0)
    third = HeldBlocks([3, 4])
    assert tables.update([second, third]).tolist() == [[0, 3], [1, 4]]
    first.push([5])
    tables.update([first])
    assert first.row == 2


def test_update_of_a_sequence_with_several_feeds_gives_one_row() -> None:
    tables, held, other = tables_of(), HeldBlocks([7, 5]), HeldBlocks([1])
    assert tables.update([held, held, other]).tolist() == [[0, 7], [1, 5], [8, 1]]
    assert (held.row, other.row) == (0, 1)


def test_update_without_rows_takes_the_row_of_whoever_was_not_fed_for_longest() -> None:
    tables = tables_of(rows=2)
    held = [HeldBlocks([number]) for number in range(3)]
    tables.update(held[:2])
    tables.update(held[:1])
    tables.update(held[2:])
    assert [each.row for each in held] == [0, None, 1]
    assert tables.update(held[1:2]).tolist() == [[0, 1]]


def test_update_with_more_sequences_than_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="more sequences than the 3 rows"):
        tables_of().update([HeldBlocks([number]) for number in range(4)])


def test_update_after_a_step_that_failed_tells_whole_rows() -> None:
    tables, held = tables_of(), HeldBlocks([7, 5])
    tables.update([held])
    tables.forget()
    assert tables.update([held]).tolist() == [[0, 7], [1, 5]]


def test_step_that_raises_has_its_blocks_told_again() -> None:
    tables, held = tables_of(), HeldBlocks([7, 5])
    step = StepInput.of(tables, [Feed([1], 1, 0, held, None)])
    with pytest.raises(ArithmeticError), together(None, tables, step):
        raise ArithmeticError
    again = StepInput.of(tables, step.feeds)
    assert again.new_blocks.tolist() == step.new_blocks.tolist() == [[0, 7], [1, 5]]
    with together(None, tables, again):
        pass
    assert not len(StepInput.of(tables, step.feeds).new_blocks)


def test_tables_that_are_told_what_is_new_are_those_of_rank_0() -> None:
    """Sequences come, grow, are cut and end, and some steps fail."""
    rng, tables, others = random.Random(0), tables_of(rows=4), tables_of(rows=4)
    held = [HeldBlocks() for _ in range(6)]
    for _ in range(300):
        for each in held:
            if rng.random() < 0.3:
                each.drop(rng.randrange(len(each) + 1))
            each.push(rng.choices(range(1, 99), k=rng.randrange(8 - len(each) + 1)))
        fed = [each for each in rng.sample(held, rng.randrange(1, 5)) if each]
        new = tables.update(fed)
        if rng.random() < 0.2:
            tables.forget()
        else:
            others.write(new)
            for each in fed:
                assert np.array_equal(others.on_host[each.row, : len(each)], each[:])
