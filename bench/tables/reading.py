"""Results as they lie in bench/results, and cells of a table made of them."""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from bench.report import RESULTS
from workshop.markdown import table

KINDS = {"json": "JSON", "question_answer": "question/answer"}  # names of kinds of text, if they differ
AHEAD = "pace, draft-ahead"  # mode of bench/simulate.py
MODES = {"plain": "plain", "fixed-4": "K = 4", "fixed-6": "K = 6", "adaptive": "pace"}

Row = Mapping[str, Any]


@cache
def results(name: str) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return stored


def written(lines: Iterable[Row]) -> str:
    """Returns a table of lines, each with its values by heading. Numbers are told with two digits."""
    every = list(lines)
    header = dict.fromkeys(heading for line in every for heading in line)
    return table([*header], ([_cell(line.get(heading, "")) for heading in header] for line in every))


def _cell(value: Any) -> str:
    return number(value) if value is None or isinstance(value, float) else str(value)


def pivoted(rows: Iterable[Row], by: Mapping[str, str], told: Callable[[Row], Row]) -> Iterable[Row]:
    """Returns a line for all rows that have the same values in some fields.

    Args:
        by: these fields, by heading.
        told: gives the values by heading that a row adds to its line.
    """
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        same = {heading: row[field] for heading, field in by.items()}
        lines.setdefault(tuple(same.values()), same).update(told(row))
    return lines.values()


def source(name: str) -> str:
    """Returns the origin of a benchmark's results: command, machine as far as it was noted, threads, day."""
    stored = results(name)
    commands = stored.get("commands") or [stored["command"]]
    told = dict.fromkeys(commands.values() if isinstance(commands, dict) else commands)
    machine = stored["machine"]
    device = machine["device"] if machine["device"] != "cpu" else None
    facts = [device, machine["processor"], f"{machine['cores']} cores", _threads(stored), stored["date"]]
    return f"{', '.join(map(_as_code, told))}: {', '.join(filter(None, facts))}.\n\n"


def _as_code(command: str) -> str:
    """Returns the command as code, up to a remark in parentheses."""
    code, parenthesis, remark = command.partition(" (")
    return f"`{code}`{parenthesis}{remark}"


def _threads(stored: Row) -> str | None:
    threads = stored.get("threads", stored["machine"]["torch_threads"])
    if threads is None:
        return None
    if isinstance(threads, dict):
        return "threads: " + " and ".join(f"{role} {count}" for role, count in threads.items())
    return f"{threads} thread{'s' if threads > 1 else ''}"


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def found(rows: Iterable[Row], **wanted: Any) -> Row:
    """Returns the row with these values."""
    (row,) = (row for row in rows if all(row[name] == value for name, value in wanted.items()))
    return row
