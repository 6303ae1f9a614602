"""No message of a sender with the deployment's token ends a worker or touches another stream."""

import pytest

from tests.fuzz.fuzzing import fuzz
from tests.fuzz.harness import Harness
from tests.fuzz.sessions import sessions

MIN_SERVED = 0.2  # share of the streams that have to come to a normal end: refusals alone prove little


@pytest.mark.parametrize("count", [80, pytest.param(1200, marks=pytest.mark.slow)])
def test_worker_message_of_any_kind_ends_its_own_stream_at_most(
    harness: Harness, count: int, seed: int
) -> None:
    fuzz(harness, sessions(), count, seed)
    assert harness.ended.total() >= count
    assert harness.ended["OK"] >= MIN_SERVED * harness.ended.total(), harness.ended
