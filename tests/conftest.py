from collections.abc import Iterator

import pytest

from tests.fakes.spans import Spans


@pytest.fixture
def spans() -> Iterator[Spans]:
    """What is recorded during the test."""
    recorded = Spans()
    recorded.clear()
    yield recorded
    recorded.clear()
