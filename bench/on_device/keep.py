"""Keeps figures for the docs: `python -m bench on_device keep FOLDER NAME` writes bench/results/NAME.json."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import RESULTS


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench on_device keep")
    parser.add_argument("folder", type=Path, help="folder of the JSON lines that the other scripts wrote")
    parser.add_argument("name", help="name of the results: on_device, or on_device_streams of two versions")
    options = parser.parse_args(arguments)
    runs: dict[str, dict[str, Any]] = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(options.folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        runs |= {line["command"]: line for line in lines if "command" in line}
        rows[path.stem] = [line for line in lines if "part" in line]
    last = max(runs.values(), key=lambda run: run["date"])
    kept = {"commands": [*runs], "date": last["date"], "machine": last["machine"], **rows}
    (RESULTS / f"{options.name}.json").write_text(json.dumps(kept, indent=1) + "\n")
