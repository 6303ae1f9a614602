"""Table of metrics, its copy in the docs, and the values recorded under its names."""

import ast
import re
from pathlib import Path

import pytest

from outrider.telemetry.counters import COUNTERS, IN_EVERY_ANSWER, IN_REPORTS
from outrider.telemetry.instruments import Instruments
from outrider.telemetry.metrics import OF_GATEWAYS, OF_WORKERS
from outrider.telemetry.reasons import DepthReason
from protos import generation_pb2
from tests.support.series import series_of
from workshop.pages.marks import COMMAND, DOCS
from workshop.pages.metrics_tables import metrics, pages, reasons

METRICS = [*OF_GATEWAYS, *OF_WORKERS]
IN_ANSWERS = [*IN_EVERY_ANSWER, *IN_REPORTS]
ROOT = Path(__file__).parents[2]


class Recorded:
    """Instrument that keeps what is recorded."""

    def __init__(self, metric):
        self.values = []
        self.inc = self.set = self.observe = lambda value, tags: self.values.append((value, tags))


def test_tables_of_the_docs_are_those_of_the_code():
    for name, text in pages().items():
        assert text == (DOCS / name).read_text(), f"run {COMMAND}"


def test_table_has_a_row_for_every_reason():
    assert all(f"| `{reason}` | {reason.meaning} |" in reasons() for reason in DepthReason)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_table_has_a_row_for_every_metric_with_unit_and_meaning(metric):
    assert re.fullmatch("[a-z_]+", metric.name.replace("vllm_e2e_", "vllm_"))  # vLLM's name has a digit
    row = next(line for line in metrics().splitlines() if f"`ray_{metric.name}" in line)
    assert metric.unit
    assert metric.unit in row
    assert metric.meaning in row
    assert bool(metric.buckets) is (metric.kind == "histogram")


def strings_of(*packages: str) -> set[str]:
    """Returns every literal string in the code of these packages."""
    sources = [path.read_text() for package in packages for path in (ROOT / package).rglob("*.py")]
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.parametrize(("metrics", "package"), [(OF_GATEWAYS, "gateway"), (OF_WORKERS, "actors")])
def test_metric_of_the_table_is_counted_in_the_code_of_its_process(metrics, package):
    """A row without a line that counts would be shown as a series that never comes."""
    counted = strings_of(package) | {counter.metric for counter in COUNTERS}
    assert not [metric.name for metric in metrics if metric.name not in counted]


def test_counters_of_answers_have_a_row_in_the_docs_and_a_field_on_the_wire():
    rows = (DOCS / "requests.md").read_text()
    assert not [counter.name for counter in IN_ANSWERS if f"`{counter.name}`" not in rows]
    fields = generation_pb2.SpeculationCounts.DESCRIPTOR.fields_by_name
    lacking = {counter.name for counter in IN_ANSWERS if counter.name not in fields}
    assert lacking == {"fallbacks"}  # the sum of three counters


def test_counters_of_spans_have_a_row_in_the_docs():
    rows = (DOCS / "traces.md").read_text()
    assert not [
        counter.name for counter in COUNTERS if counter.is_in_spans and f"`{counter.name}`" not in rows
    ]


def test_metric_names_are_unique():
    names = [name for metric in METRICS for name in series_of(metric)]
    assert len(names) == len({*names})


def test_counter_gets_only_what_is_new():
    made = {}
    instruments = Instruments(METRICS, lambda metric: made.setdefault(metric.name, Recorded(metric)))
    for total in (3, 3, 5):
        instruments.total("outrider_tokens", total, task="a", drafter="model")
    instruments.total("outrider_tokens", 4, task="b", drafter="model")
    told = [(value, tags["task"]) for value, tags in made["outrider_tokens"].values]
    assert told == [(3, "a"), (2, "a"), (4, "b")]
