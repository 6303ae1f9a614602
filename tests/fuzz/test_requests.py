"""No request hurts another request: no answer is a defect of ours, and no other text changes.

Every run draws new requests. A run that fails prints the line that repeats its requests:
``python -m pytest tests/fuzz --hypothesis-seed=SEED``, with the test's name before the option.
"""

import pytest

from tests.fuzz.calls import ANSWERED, LEFT
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.harness import Harness
from tests.fuzz.requests import requests

# Share of the calls that have to get as far as an answer: refusals alone prove little. Which calls are
# drawn is chance, and of 150 about half get so far.
MIN_ANSWERED = 0.35


@pytest.mark.parametrize("count", [150, pytest.param(3500, marks=pytest.mark.slow)])
def test_request_with_any_values_is_no_defect_and_changes_no_other_text(
    harness: Harness, count: int, seed: int
) -> None:
    fuzz(harness, requests(), count, seed)
    ended, total = harness.ended, harness.ended.total()
    assert total >= count
    assert ended[ANSWERED] + ended[LEFT] >= MIN_ANSWERED * total, ended
