"""The tables of the docs are those of the results: all are there, and none is typed by hand."""

import pytest

from bench.tables import reading, summary
from bench.tables.pages import COMMAND, PAGES, TABLES, text_of, updated
from workshop.pages.marks import begin


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_tables_of_a_page_are_written_from_the_results(path):
    page = path.read_text()
    assert updated(page) == page, f"run {COMMAND}"


@pytest.mark.parametrize("name", TABLES)
def test_table_stands_once_with_as_many_cells_in_each_row(name):
    assert sum(path.read_text().count(begin(name, COMMAND)) for path in PAGES) == 1
    rows = [line.count(" | ") for line in text_of(name).splitlines() if line.startswith("|")]
    assert len(rows) > 2
    assert len(set(rows)) == 1


def test_all_results_are_shown():
    stored = {path.stem for path in reading.RESULTS.glob("*.json")}
    assert stored == {bench for bench, _ in TABLES.values() if bench}


def test_source_says_command_machine_and_day():
    stored = reading.results("engine")
    line = reading.source("engine")
    assert all(fact in line for fact in (stored["command"], stored["date"], stored["machine"]["processor"]))


def test_summary_if_a_figure_changes_changes(monkeypatch):
    stored = reading.results("plain")
    rows = [{**row, "ratio": 2.0} for row in stored["rows"]]
    changed = lambda name: {"rows": rows} if name == "plain" else reading.results(name)  # noqa: E731
    monkeypatch.setattr(summary, "results", changed)
    (line,) = (line for line in summary.summary().splitlines() if "generate" in line)
    assert "2.00, 2.00, 2.00 times" in line
    assert "missed" not in line


def test_summary_if_openvino_is_faster_says_that_the_aim_is_missed(monkeypatch):
    stored = reading.results("peers")["rows"]

    def lines_with(openvino_rate: float) -> list[str]:
        rows = [
            {**row, "tokens/s": openvino_rate if row["peer"] == "OpenVINO GenAI" else 10.0} for row in stored
        ]
        changed = lambda name: {"rows": rows} if name == "peers" else reading.results(name)  # noqa: E731
        monkeypatch.setattr(summary, "results", changed)
        return [line for line in summary.summary().splitlines() if "service" in line and "OpenVINO" in line]

    assert all("0.50, 0.50 times" in line and "missed" in line for line in lines_with(20.0))
    assert not any("missed" in line for line in lines_with(10.0))
    assert len(lines_with(10.0)) == 2
