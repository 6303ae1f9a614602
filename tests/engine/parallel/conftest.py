"""Ranks for all tests of sharing: to start processes takes longer than most of these."""

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks


@pytest.fixture(scope="package")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="package")
def apart() -> Iterator[Ranks]:
    """Two ranks that share no memory, as on two nodes."""
    ranks = Ranks(2, are_apart=True)
    yield ranks
    ranks.close()


@pytest.fixture(scope="package")
def four_ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="package")
def gpu_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2, on_gpus=True)
    yield ranks
    ranks.close()
