"""Collects the figures of a script: each is printed and written at once, and the script's time is bounded."""

import argparse
import json
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from bench.report import command, machine
from workshop.memory import free_memory

Rows = Iterable[Mapping[str, Any]]
Part = Callable[[argparse.Namespace], Rows]


class TimeIsUp(KeyboardInterrupt):
    """The time of a part is over. It is a KeyboardInterrupt, because asyncio and Ray do not swallow that."""


class Figures:
    """JSON lines of a script. A part that fails or takes too long is skipped, and the reason is written."""

    def __init__(self, path: Path, seconds: float) -> None:
        """
        Args:
            path: file to which a line for the run and a line for each figure are appended.
            seconds: time limit of all parts together.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._write(
            {"command": command(), "date": datetime.now(UTC).date().isoformat(), "machine": machine()}
        )
        self._started = time.monotonic()
        self._seconds = seconds

    def take(self, part: str, rows: Callable[[], Rows], most_s: float) -> None:
        """Writes the rows of a part as they come, for at most ``most_s`` seconds."""
        left = min(most_s, self._seconds - self._passed())
        if left <= 0:
            self._tell(part, {"skipped": "no time is left"})
            return
        before = signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, left)
        try:
            for row in rows():
                self._tell(part, row)
        except TimeIsUp:
            self._tell(part, {"skipped": f"not done after {left:.0f} s"})
        except Exception as error:
            traceback.print_exc()
            self._tell(part, {"skipped": repr(error)[-500:]})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        free_memory()

    def _tell(self, part: str, row: Mapping[str, Any]) -> None:
        self._write({"part": part, "at, s": round(self._passed(), 1), **row})

    def _write(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(row, default=str)
        print(line, flush=True)
        with self._path.open("a") as file:
            file.write(line + "\n")

    def _passed(self) -> float:
        return time.monotonic() - self._started


def _interrupt(*_: object) -> None:
    raise TimeIsUp


def take_parts(
    module: str,
    parts: Mapping[str, Part],
    arguments: Sequence[str],
    *,
    seconds: float,
    most_s: float,
    add: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> None:
    """Runs the parts of a script, one after the other.

    Args:
        module: name of the script's module, and of the file of its figures.
        seconds: default time limit of all parts together.
        most_s: time limit of each part, seconds.
        add: adds the script's own options.
    """
    name = module.rpartition(".")[2]
    parser = argparse.ArgumentParser(prog=f"python -m bench on_device {name}")
    parser.add_argument("--out", type=Path, default=Path("."), help=f"folder of {name}.jsonl")
    parser.add_argument(
        "--pair", type=Path, default=Path("/tmp/pair"), help="folder that bench.on_device.pair wrote"
    )
    parser.add_argument("--parts", nargs="+", choices=parts, default=[*parts])
    parser.add_argument("--seconds", type=float, default=seconds, help="limit of all parts")
    add(parser)
    options = parser.parse_args(arguments)
    figures = Figures(options.out / f"{name}.jsonl", options.seconds)
    for part in options.parts:
        figures.take(part, partial(parts[part], options), most_s)
