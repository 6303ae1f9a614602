"""Runs the engine's tests that need a GPU: `python -m bench on_device checks`.

Each failure is reported at once with the end of its report, so that nothing is lost if the run is cut off.
The last row has the counts. With pytest-xdist, the tests run in several processes.
"""

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import pytest

from bench.on_device.figures import Rows, take_parts

SECONDS, PART_S = 300.0, 300.0
ROOT = Path(__file__).parents[2]
MARKS = ("tests.support.gpu", "torch.cuda.is_available()")  # texts of test files that need a GPU
REPORT = 1500  # last characters of a report that are kept


def files() -> list[str]:
    """Returns the files of the engine's tests that need a GPU."""
    found = sorted((ROOT / "tests" / "engine").rglob("test_*.py"))
    return [str(path) for path in found if any(mark in path.read_text() for mark in MARKS)]


class ReportsOfTests:
    """Pytest plugin that counts outcomes and queues failures."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.rows: SimpleQueue[dict[str, Any] | None] = SimpleQueue()  # None: the run has ended

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        self.counts[report.outcome] += 1
        if report.failed:
            self.rows.put({"failed": report.nodeid, "report": report.longreprtext[-REPORT:]})


def tests(options: argparse.Namespace) -> Rows:
    """Yields each failure, then the counts."""
    reports = ReportsOfTests()
    arguments = [
        "-q",
        "-c",
        str(ROOT / "pyproject.toml"),
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "-W",  # this process has imported packages whose plugins pytest would rewrite
        "ignore::pytest.PytestAssertRewriteWarning",
        *(options.tests or files()),
    ]
    if find_spec("xdist") and options.processes > 1:
        arguments += ["-n", str(options.processes)]

    def run() -> None:
        try:
            pytest.main(arguments, plugins=[reports])
        except Exception as error:
            reports.rows.put({"skipped": repr(error)[-REPORT:]})
        finally:
            reports.rows.put(None)

    Thread(target=run, daemon=True).start()
    yield from iter(reports.rows.get, None)
    yield dict(reports.counts)


PARTS = {"tests": tests}


def main(arguments: Sequence[str]) -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 12))
        parser.add_argument("--tests", nargs="+", help="files or tests; unless named, all that ask for a GPU")

    take_parts(__name__, PARTS, arguments, seconds=SECONDS, most_s=PART_S, add=add)
