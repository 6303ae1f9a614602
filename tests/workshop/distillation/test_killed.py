"""`outrider distil` as a process that is killed: the same command goes on, and ends in the same weights."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.patience import START_S, wait_until

ROOT = Path(__file__).parents[3]
PROMPTS = ["workshop.demo.consignments", "prompts.jsonl", "--prompts", "60"]
DISTIL = ["outrider.cli.command_line", "distil", "--prompts", "prompts.jsonl", "--learning-rate", "0.002"]
DISTIL += ["--steps", "60", "--measure-every", "10", "--threads", "1"]
DISTIL += ["target=demo-small", "target.cache_memory=100000000"]


def start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(command: list[str], folder: Path) -> str:
    process = start(command, folder)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    return said


@pytest.mark.slow
@pytest.mark.parametrize("file", ["answers.jsonl", "training/unfinished.pt"])
def test_process_that_is_killed_is_gone_on_with(tmp_path: Path, file: str) -> None:
    run(PROMPTS, tmp_path)
    (told,) = (line for line in run([*DISTIL, "--out", "whole"], tmp_path).splitlines() if "consign" in line)
    _, before, after = told.strip("| ").split(" | ")[1:]
    assert float(after) > float(before)
    process = start([*DISTIL, "--out", "killed"], tmp_path)
    wait_until((tmp_path / "killed" / "unfinished" / file).exists, START_S)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    said = run([*DISTIL, "--out", "killed"], tmp_path)
    assert "goes on with what is unfinished" in said
    whole, killed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(tensor, killed[name]) for name, tensor in whole.items())
