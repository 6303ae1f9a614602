import os
from collections.abc import Iterator

import hypothesis
import pytest

from tests.fakes.spans import Spans

# Read by torch when it is imported. Models are so small here that threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read by triton when it is imported: kernels run on the CPU. With 0, on a machine with a GPU, they run there.
os.environ.setdefault("TRITON_INTERPRET", "1")


# How long an example takes says more of what else the machine does.
hypothesis.settings.register_profile("outrider", deadline=None)
hypothesis.settings.load_profile("outrider")


@pytest.fixture
def spans() -> Iterator[Spans]:
    """What is recorded during the test."""
    recorded = Spans()
    recorded.clear()
    yield recorded
    recorded.clear()
