"""The table of metrics, the README's copy of it, and what is recorded under these names."""

import re
from pathlib import Path

import pytest

from outrider.telemetry.instruments import Instruments
from outrider.telemetry.metrics import OF_GATEWAYS, OF_WORKERS
from outrider.telemetry.table import rewritten, table

ROOT = Path(__file__).parent.parent.parent
METRICS = [*OF_GATEWAYS, *OF_WORKERS]


class Recorded:
    """One instrument, and what it was told."""

    def __init__(self, metric):
        self.values = []
        self.inc = self.set = self.observe = lambda value, tags: self.values.append((value, tags))


def test_the_table_of_the_readme_is_the_one_in_the_code():
    readme = (ROOT / "README.md").read_text()
    assert rewritten(readme) == readme, "run python -m outrider.telemetry.table"


def test_a_readme_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="marks"):
        rewritten("# Outrider\n")


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_metric_has_a_row_with_its_unit_and_meaning(metric):
    assert re.fullmatch("[a-z_]+", metric.name)
    row = next(line for line in table().splitlines() if f"`ray_{metric.name}" in line)
    assert metric.unit
    assert metric.unit in row
    assert metric.meaning in row
    assert bool(metric.buckets) is (metric.kind == "histogram")


def test_no_name_is_taken_twice():
    names = [name for metric in METRICS for name in metric.exported]
    assert len(names) == len({*names})


def test_a_counter_is_told_what_is_new():
    made = {}
    instruments = Instruments(METRICS, lambda metric: made.setdefault(metric.name, Recorded(metric)))
    for total in (3, 3, 5):
        instruments.total("outrider_tokens", total, task="a", drafter="model")
    instruments.total("outrider_tokens", 4, task="b", drafter="model")
    told = [(value, tags["task"]) for value, tags in made["outrider_tokens"].values]
    assert told == [(3, "a"), (2, "a"), (4, "b")]
