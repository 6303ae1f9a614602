"""Scripts for a lent GPU that start services, on a CPU and by their smallest shapes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STREAMS = 8  # number of texts while a process is killed


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    run("pair", str(folder), "--device", "cpu", "--shapes", "tiny", "tiny")
    return folder


def run(script: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "bench", "on_device", script, *arguments], check=True)


def told(script: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Figures that a script tells, after the line that tells of its run."""
    run(script, "--out", str(folder), *arguments)
    _, *figures = (folder / f"{script}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in figures]


@pytest.mark.slow
def test_service_script_in_every_mode_gets_the_known_texts(tiny_pair: Path, tmp_path: Path) -> None:
    parts = ["masks", "workers", "batch_invariant"]
    lines = told("service", tmp_path, "--pair", str(tiny_pair), "--small", "--parts", *parts)
    assert {line["part"] for line in lines} == {*parts}
    assert [line for line in lines if "skipped" in line] == []
    rows = [line for line in lines if "mode" in line]
    assert {row["mode"] for row in rows} == {"plain", "fixed-3", "adaptive"}
    assert [row["correct texts"] for row in rows] == [row["streams"] for row in rows]
    rates = [row["acceptance rate"] for row in rows if row["mode"] == "fixed-3"]
    assert rates == pytest.approx([0.8] * len(rates), abs=0.1)


@pytest.mark.slow
def test_failures_script_with_a_worker_lost_gets_the_known_texts(tiny_pair: Path, tmp_path: Path) -> None:
    parts = ["engine of the target", "frontend of the draft"]
    lines = told("failures", tmp_path, "--pair", str(tiny_pair), "--parts", *parts)
    assert [line["part"] for line in lines] == parts
    assert [line["correct texts"] for line in lines] == [STREAMS] * 2
