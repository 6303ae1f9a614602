"""Runs the commands on a page of docs/, and compares their output with the output on the page.

Commands are in blocks marked ``console``: a command after ``$ ``, its further lines after ``> ``, then its
output. In the output, ``...`` matches anything, and alone on a line any lines. Numbers with a decimal point
or an exponent are measured and may differ. Everything else must be equal, except for the width of columns.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil  # type: ignore[import-untyped]

from tests.support.patience import PATIENCE
from tests.support.running import serve_run

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = (  # pages with commands that are run
    "adapters.md",
    "choosing-a-draft.md",
    "checking.md",
    "fitting-a-draft.md",
    "never-stalls.md",
    "receipts.md",
    "paired-runs.md",
    "rolling-out-a-draft.md",
)
COMMAND_S = 900.0 * PATIENCE  # time limit of a command, seconds
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.M | re.S)
VARIES = re.compile(r"(\.{3})|(\d[\d,]*(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+))")
ANYTHING, NUMBER, ANY_LINES = r".*", r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", r"(?:.*\n)*?"
SERVE, EXPORT = "serve run ", "export "
STARTED = ("A first request", "Submitted deploy config")  # log lines; the second is for Serve config files


@dataclass(frozen=True)
class Command:
    """Shell command, and the lines of standard output that the page shows."""

    text: str
    shown: tuple[str, ...] = ()


def commands(page: str) -> Iterator[Command]:
    """Yields the commands of a page in order. Raises ValueError if a block does not begin with a command."""
    for block in BLOCK.findall(page):
        if not block.startswith("$ "):
            raise ValueError(f"a command begins with '$ ', not as {block[:40]!r}")
        for part in block.removeprefix("$ ").split("\n$ "):
            first, *lines = part.rstrip("\n").split("\n")
            more = next(
                (number for number, line in enumerate(lines) if not line.startswith("> ")), len(lines)
            )
            text = "\n".join([first, *(line.removeprefix("> ") for line in lines[:more])])
            yield Command(text, tuple(lines[more:]))


def agrees(printed: str, shown: Sequence[str]) -> bool:
    """Whether the printed text matches the shown lines. Empty lines are ignored."""
    lines = "".join(f"{line}\n" for line in map(_evened, printed.splitlines()) if line)
    patterns = (_pattern(line) for line in map(_evened, shown) if line)
    return re.fullmatch("".join(patterns), lines) is not None


def _evened(line: str) -> str:
    return " ".join(line.split())


def _pattern(line: str) -> str:
    if line == "...":
        return ANY_LINES
    pattern, end = "", 0
    for varies in VARIES.finditer(line):
        pattern += re.escape(line[end : varies.start()]) + (ANYTHING if varies[1] else NUMBER)
        end = varies.end()
    return pattern + re.escape(line[end:]) + r"\n"


class Terminal:
    """Runs the commands of a page in a folder. A service runs until the next service starts, or to the end.

    Exported variables are kept between commands; no other shell state is kept.
    """

    def __init__(self, folder: Path, of_ray: str, services: ExitStack) -> None:
        """of_ray: folder in which Ray looks up RAY_ADDRESS=auto if there are several clusters."""
        self._folder = folder
        self._current_cluster = Path(of_ray, "ray", "ray_current_cluster")
        self._services = services
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = {"PATH": path, "RAY_TMPDIR": of_ray}

    def run(self, command: Command) -> None:
        """Runs a command. Raises AssertionError if it fails or its output does not match."""
        if command.text.startswith(SERVE):
            self._serve(command.text.removeprefix(SERVE).split())
            return
        if command.text.startswith(EXPORT):
            self._export(command.text)
            return
        process = subprocess.Popen(
            ["bash", "-c", command.text],
            cwd=self._folder,
            env={**os.environ, **self._environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            printed, errors = process.communicate(timeout=COMMAND_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        assert process.returncode == 0, f"{command.text}\n{printed}{errors}"
        shown = "\n".join(command.shown)
        assert not shown or agrees(printed, command.shown), f"{command.text}\n{printed}\nis not\n{shown}"

    def _export(self, text: str) -> None:
        said = subprocess.run(
            ["bash", "-c", f"{text}\nenv -0"],
            cwd=self._folder,
            env={**os.environ, **self._environment},
            capture_output=True,
            check=True,
            text=True,
        )
        variables = (line.partition("=") for line in said.stdout.split("\0") if line)
        self._environment |= {name: value for name, _, value in variables}

    def _serve(self, arguments: Sequence[str]) -> None:
        self._services.close()
        started = serve_run(
            self._folder,
            arguments,
            "local",
            self._environment,
            lambda log: any(words in log for words in STARTED),
        )
        process = self._services.enter_context(started)
        words = (word for child in process.children(recursive=True) for word in _words_of(child))
        flag = "--gcs-address="  # option of a raylet
        # `ray start` writes this file, but `serve run` does not for the cluster that it starts.
        self._current_cluster.write_text(next(word for word in words if word.startswith(flag))[len(flag) :])


def _words_of(process: psutil.Process) -> list[str]:
    """Returns the arguments of a process; empty if it has ended."""
    try:
        words: list[str] = process.cmdline()
    except psutil.NoSuchProcess:
        return []
    return words


@contextmanager
def terminal(folder: Path) -> Iterator[Terminal]:
    """Yields a terminal that does not see clusters of other tests, and ends what it has started."""
    with TemporaryDirectory(prefix="ray-") as of_ray, ExitStack() as services:
        yield Terminal(folder, of_ray, services)
