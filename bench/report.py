"""Options of a benchmark, and its report: rows, the command that made them, and the machine."""

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from outrider.cli.processor import processor_name

RESULTS = Path(__file__).parent / "results"


def parser_of(name: str, about: str) -> argparse.ArgumentParser:
    """Returns the parser of a benchmark's options. about: its docstring; the help shows the first line."""
    return argparse.ArgumentParser(prog=f"python -m bench {name}", description=about.partition("\n")[0])


def machine() -> dict[str, Any]:
    """Returns the facts that a figure depends on: processor, device, threads, versions."""
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def command() -> str:
    """Returns the command that runs the benchmark of this process."""
    return shlex.join(["python", "-m", "bench", *sys.argv[1:]])


def save(name: str, rows: Sequence[Mapping[str, Any]], **facts: Any) -> Path:
    """Writes bench/results/NAME.json: facts of the run, then its rows."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    stats = {
        "command": command(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        **facts,
        "rows": list(rows),
    }
    path.write_text(json.dumps(stats, indent=1) + "\n")
    return path


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rows as aligned text. The first row defines the columns; floats have three digits."""
    if not rows:
        return "(no rows)"
    header = list(rows[0])
    cells = [header, *([_cell(row.get(column)) for column in header] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)
