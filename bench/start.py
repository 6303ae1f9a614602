"""``python -m bench start``: where the time from ``serve run cluster.app`` to the first answer goes, and how
much memory every process that it started takes after that answer.

Of several runs the quickest counts. Processor time says something beside other work too. Memory is
proportional set size, in which what several processes share is counted once.
"""

import argparse
import json
import re
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from bench.report import save, table
from tests.support.running import Service, serving

REQUEST = {"prompt": '{"name": "', "max_tokens": 60, "temperature": 0}
LOOK_S = 0.02
# What the command prints when a phase ends, in order.
ENDS = {
    "imports of the command": "Using address",
    "Ray": "Started a local Ray instance",
    "models looked at": "GB on each device",
    "Serve": "Started Serve",
    "workers and gateway": "A first request",
}
OF_WORKER = re.compile(r"(target|draft) worker: .*?; (.*)")

Line = tuple[float, str]  # seconds from the command on, text


@dataclass(frozen=True)
class Start:
    seconds: dict[str, float]  # by phase, in order
    workers: dict[str, str]  # what a role's worker says of its own phases
    processor_s: float  # of all processes, until the answer
    memory: list[tuple[str, float]]  # MB of each process, the largest first

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class Reader(threading.Thread):
    """Reads a file as it grows and notes when each line came."""

    def __init__(self, file: Path, begun: float) -> None:
        super().__init__(name="reader", daemon=True)
        self._file, self._begun = file, begun
        self._is_over = threading.Event()
        self._lines: list[Line] = []

    def run(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self._read()

    def lines(self) -> list[Line]:
        """All of them. Nothing is read any more."""
        self._is_over.set()
        self.join()
        self._read()
        return self._lines

    def _read(self) -> None:
        now = time.monotonic() - self._begun
        written = self._file.read_text().splitlines() if self._file.exists() else []
        self._lines += [(now, line) for line in written[len(self._lines) :]]


def phases(lines: Sequence[Line], answered: float) -> dict[str, float]:
    """Seconds of each phase. Raises ValueError if the end of one was not printed."""
    ends = [_first(lines, text) for text in ENDS.values()] + [answered]
    names = [*ENDS, "first request"]
    return {name: end - before for name, before, end in zip(names, [0.0, *ends], ends, strict=False)}


def _first(lines: Sequence[Line], text: str) -> float:
    for seconds, line in lines:
        if text in line:
            return seconds
    raise ValueError(f"the service never printed {text!r}")


def worker_phases(lines: Sequence[Line]) -> dict[str, str]:
    found = (OF_WORKER.search(line) for _, line in lines)
    return {match[1]: match[2] for match in found if match}


def start_once(settings: Sequence[str]) -> Start:
    """settings: as `serve run cluster.app` takes them. Raises what ``serving`` raises."""
    given = dict(setting.split("=", 1) for setting in settings)
    with tempfile.TemporaryDirectory() as folder:
        reader = Reader(Path(folder) / "serve.log", time.monotonic())
        reader.start()
        begun = time.monotonic()
        with serving(Path(folder), given) as service:
            _ask(service)
            answered = time.monotonic() - begun
            processes = [service.process, *service.process.children(recursive=True)]
            processor_s = sum(_processor_s(process) for process in processes)
            memory = sorted(_memory(processes), key=lambda row: -row[1])
            lines = reader.lines()
    return Start(phases(lines, answered), worker_phases(lines), processor_s, memory)


def _ask(service: Service) -> None:
    body = json.dumps(REQUEST).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{service.http}/v1/completions", body, headers)
    ) as answer:
        assert json.load(answer)["choices"][0]["text"]


def _processor_s(process: psutil.Process) -> float:
    """Of its ended children too."""
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def _memory(processes: Sequence[psutil.Process]) -> Iterator[tuple[str, float]]:
    for process in processes:
        yield name_of(process.cmdline()), process.memory_full_info().pss / 1e6


def name_of(command: Sequence[str]) -> str:
    """Of a process: Ray's own title of an actor, or the program without its folders and arguments."""
    words = " ".join(command).split()
    if words[0].startswith("ray::"):
        return words[0].removeprefix("ray::")
    programs = [word for word in words if not word.startswith("-")]
    is_python = Path(programs[0]).name.startswith("python") and len(programs) > 1
    return Path(programs[is_python]).name


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench start", description=__doc__.partition("\n\n")[0])
    parser.add_argument("settings", nargs="*", help="name=value, as `serve run cluster.app` takes them")
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args(arguments)
    start = min((start_once(options.settings) for _ in range(options.runs)), key=lambda start: start.total)
    rows = [{"phase": phase, "seconds": round(seconds, 2)} for phase, seconds in start.seconds.items()]
    rows.append({"phase": "until the first answer", "seconds": round(start.total, 2)})
    print(table(rows))
    for role, said in start.workers.items():
        print(f"{role}: {said}")
    print(f"processor time of all processes: {start.processor_s:.1f} s\n")
    processes = [{"process": name, "MB": round(size, 1)} for name, size in start.memory]
    processes.append({"process": "together", "MB": round(sum(size for _, size in start.memory), 1)})
    print(table(processes))
    save(
        "start",
        rows,
        workers=start.workers,
        processor_s=start.processor_s,
        memory=processes,
        runs=options.runs,
    )
