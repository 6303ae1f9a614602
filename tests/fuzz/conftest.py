import random
from collections.abc import Iterator

import pytest

from tests.fuzz.harness import Harness


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Seed of what is generated: new in every run, or the seed that ``--hypothesis-seed`` names.

    It is printed, and pytest shows it with a test that fails: that line is enough to run the test again.
    """
    given = request.config.getoption("--hypothesis-seed")
    seed = random.SystemRandom().getrandbits(32) if given is None else int(given)
    print(f"Run it again: python -m pytest '{request.node.nodeid}' --hypothesis-seed={seed}")
    return seed


@pytest.fixture
def harness() -> Iterator[Harness]:
    with Harness() as harness:
        yield harness
