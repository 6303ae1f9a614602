"""Results as they lie in bench/results, and cells of a table made of them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"

KINDS = {
    "code": "code",
    "prose": "prose",
    "json": "JSON",
    "question_answer": "question/answer",
    "stories": "stories",
    "arithmetic": "arithmetic",
    "conversations": "conversations",
    "tool_calls": "tool calls",
    "schema_answers": "answers to schemas",
}
MODES = {"plain": "plain", "fixed-4": "K = 4", "fixed-6": "K = 6", "adaptive": "pace"}

Row = Mapping[str, Any]


@cache
def results(name: str) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return stored


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def source(name: str) -> str:
    """Returns the origin of a benchmark's results: command, machine, threads, day."""
    stored = results(name)
    commands = stored.get("commands") or [stored["command"]]
    told = dict.fromkeys(commands.values() if isinstance(commands, dict) else commands)
    machine = stored["machine"]
    facts = [machine["processor"], f"{machine['cores']} cores", _threads(stored), stored["date"]]
    return f"{', '.join(map(_as_code, told))}: {', '.join(facts)}.\n\n"


def _as_code(command: str) -> str:
    """Returns the command as code, up to a remark in parentheses."""
    code, parenthesis, remark = command.partition(" (")
    return f"`{code}`{parenthesis}{remark}"


def _threads(stored: Row) -> str:
    of_machine = stored["machine"]["torch_threads"]
    threads = stored.get("threads", stored.get("threads_of_each_process", of_machine))
    if isinstance(threads, dict):
        return "threads: " + " and ".join(f"{role} {count}" for role, count in threads.items())
    return f"{threads} thread{'s' if threads > 1 else ''}"


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def met(value: bool) -> str:
    return "yes" if value else "**no**"


def found(rows: Iterable[Row], **wanted: Any) -> dict[str, Any]:
    """Returns the row with these values."""
    (row,) = (row for row in rows if all(row[name] == value for name, value in wanted.items()))
    return dict(row)


def distinct(rows: Iterable[Row], column: str) -> list[Any]:
    return list(dict.fromkeys(row[column] for row in rows))
