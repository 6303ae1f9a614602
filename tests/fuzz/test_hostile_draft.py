"""No reply of a draft worker fails a request or changes its text."""

import pytest

from tests.fuzz.calls import ANSWERED
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.harness import Harness
from tests.fuzz.hostile import misled


@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_draft_worker_with_any_reply_leaves_the_text_unchanged(count: int, seed: int) -> None:
    with Harness(drafts=0) as harness:
        fuzz(harness, misled(), count, seed)
        assert harness.ended[ANSWERED] == harness.ended.total() >= count
