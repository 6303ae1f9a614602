"""The tables of the docs are those of the results: all are there, and none is typed by hand."""

import pytest

from bench.report import RESULTS
from bench.tables import COMMAND, OF_BENCHMARKS, PAGES, reading, readme, texts, updated
from workshop.pages.marks import begin

TEXTS = texts()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_tables_of_a_page_are_written_from_the_results(path):
    page = path.read_text()
    assert updated(page) == page, f"run {COMMAND}"


@pytest.mark.parametrize("mark", TEXTS)
def test_table_stands_once_with_as_many_cells_in_each_row(mark):
    assert sum(path.read_text().count(begin(mark, COMMAND)) for path in PAGES) == 1
    rows = [line.count(" | ") for line in TEXTS[mark].splitlines() if line.startswith("|")]
    assert len(rows) > 2
    assert len(set(rows)) == 1


def test_tables_show_all_results():
    assert {path.stem for path in RESULTS.glob("*.json")} == {*OF_BENCHMARKS}


def test_pivoted_gives_a_line_for_rows_of_equal_fields():
    rows = [{"step": "1 x 1", "dtype": dtype, "ratio": ratio} for dtype, ratio in (("a", 1.0), ("b", 2.5))]
    rows.append({"step": "8 x 1", "dtype": "b", "ratio": 3.0})
    lines = reading.pivoted(rows, {"shape": "step"}, lambda row: {row["dtype"]: row["ratio"]})
    assert reading.written(lines).splitlines() == [
        "| shape | a | b |",
        "| --- | --- | --- |",
        "| 1 x 1 | 1.00 | 2.50 |",
        "| 8 x 1 |  | 3.00 |",
    ]


def test_source_says_command_machine_and_day():
    stored = reading.results("engine")
    line = reading.source("engine")
    assert all(fact in line for fact in (stored["command"], stored["date"], stored["machine"]["processor"]))


def lines_with(monkeypatch, peer: str, rate: float) -> list[str]:
    """Lines of the summary beside a peer that is as fast as is said, while all others make ten tokens/s."""
    stored = reading.results("peers")["rows"]
    rows = [{**row, "tokens/s": rate if row["peer"] == peer else 10.0} for row in stored]
    changed = lambda name: {"rows": rows} if name == "peers" else reading.results(name)  # noqa: E731
    monkeypatch.setattr(readme, "results", changed)
    return readme.summary().splitlines()


def test_summary_if_openvino_is_faster_says_that_the_aim_is_missed(monkeypatch):
    def lines(rate: float) -> list[str]:
        every = lines_with(monkeypatch, "OpenVINO GenAI", rate)
        return [line for line in every if "service" in line and "OpenVINO" in line]

    assert all("0.50, 0.50 times" in line and "missed" in line for line in lines(20.0))
    assert not any("missed" in line for line in lines(10.0))
    assert len(lines(10.0)) == 2


def test_summary_if_generate_is_as_fast_says_that_the_aim_is_missed(monkeypatch):
    for rate, ratio, is_missed in ((5.0, "2.00, 2.00, 2.00 times", False), (10.0, "1.00, 1.00, 1.00", True)):
        (line,) = (line for line in lines_with(monkeypatch, "transformers", rate) if "generate" in line)
        assert ratio in line
        assert ("missed" in line) == is_missed
