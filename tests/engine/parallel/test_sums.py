"""Equal rows get equal sums over any number of ranks, where numerics are batch-invariant."""

from collections.abc import Iterator

import pytest
import torch

from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.parallel.sums import add_up, add_up_in_order
from tests.support.ranks import Ranks

ROWS, FEATURES = 64, 8192


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.close()


def part_of(rank: int) -> torch.Tensor:
    """One row of a rank's numbers."""
    return torch.randn(FEATURES, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)


def sums_of_equal_rows(group: RankGroup, in_order: bool) -> torch.Tensor:
    rows = part_of(group.rank).expand(ROWS, -1).contiguous()
    return (add_up_in_order if in_order else add_up)(rows)


def check_in_order(ranks: Ranks, size: int) -> None:
    expected = part_of(0).float()
    for rank in range(1, size):
        expected = expected + part_of(rank).float()
    for sums in ranks.run(sums_of_equal_rows, sums_of_equal_rows, True):
        assert torch.equal(sums, expected.to(torch.bfloat16).expand(ROWS, -1))


@pytest.mark.slow
def test_sums_in_order_of_equal_rows_at_three_ranks_are_equal(three_ranks: Ranks) -> None:
    check_in_order(three_ranks, 3)


def test_sums_in_order_of_equal_rows_at_four_ranks_are_equal(four_ranks: Ranks) -> None:
    check_in_order(four_ranks, 4)


def test_plain_sums_of_four_ranks_are_the_sum_up_to_rounding(four_ranks: Ranks) -> None:
    expected = torch.stack([part_of(rank).float() for rank in range(4)]).sum(0)
    for sums in four_ranks.run(sums_of_equal_rows, sums_of_equal_rows, False):
        assert torch.allclose(sums.float(), expected.expand(ROWS, -1), atol=0.1)
