"""The classic rules."""

import pytest

from outrider.pace.policy import threshold_depth
from outrider.pace.settings import PaceSettings

SETTINGS = PaceSettings()


@pytest.mark.parametrize(
    ("rate", "running", "is_drafting", "depth"),
    [
        (0.55, 1, True, 4),  # between the two thresholds things stay as they are
        (0.55, 1, False, 0),
        (0.49, 1, True, 0),
        (0.61, 1, False, 4),
        (0.9, 31, True, 4),
        (0.9, 32, True, 2),
        (0.9, 127, True, 2),
        (0.9, 128, True, 0),
    ],
)
def test_threshold_depth_follows_rate_and_load(rate, running, is_drafting, depth):
    assert threshold_depth(SETTINGS, rate, running, is_drafting=is_drafting) == depth


@pytest.mark.parametrize(("running", "depth"), [(31, 4), (32, 0)])
def test_thresholds_end_drafts_of_batch_requests_at_half_depth(running, depth):
    assert threshold_depth(SETTINGS, 0.9, running, is_drafting=True, is_batch=True) == depth


def test_contradicting_thresholds_are_refused():
    with pytest.raises(ValueError, match="on_above must be at least off_below"):
        PaceSettings(on_above=0.4)
