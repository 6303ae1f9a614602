"""The commands of docs/fitting-a-draft.md, as they are printed there."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cluster.arguments import read_settings
from outrider.engine.engine import Engine
from tests.support.patience import START_S, wait_until

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "fitting-a-draft.md"
MODULES = {"outrider": ["-m", "outrider.tools.command_line"], "python": []}


def commands() -> list[list[str]]:
    """Of the guide's first block, but for the one that serves."""
    block = re.findall(r"^```\n(.*?)^```", GUIDE.read_text(), re.M | re.S)[0]
    return [shlex.split(line) for line in block.splitlines() if not line.startswith("serve ")]


def start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    program, *arguments = command
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, *MODULES[program], *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(command: list[str], folder: Path) -> str:
    process = start(command, folder)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    return said


def rows(said: str) -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("| ")]
    return {line[0]: line[1:] for line in lines}


@pytest.mark.slow
def test_the_draft_is_fitted_as_the_guide_says(tmp_path: Path) -> None:
    for command in commands():
        said = run(command, tmp_path)
    _, before, after = rows(said)["consignments"]
    assert float(after) > float(before)
    assert (tmp_path / "fitted" / "README.md").exists()
    settings = read_settings({"draft": str(tmp_path / "fitted")})
    assert Engine.from_settings(settings.draft_engine("model")).vocab_size == 2048


@pytest.mark.slow
@pytest.mark.parametrize("file", ["answers.jsonl", "training/unfinished.pt"])
def test_a_process_that_is_killed_is_gone_on_with(tmp_path: Path, file: str) -> None:
    prompts, distil = commands()
    run([*prompts, "--prompts", "60"], tmp_path)
    small = ["--steps", "60", "--measure-every", "10", "--threads", "1"]
    run([*distil, *small, "--out", "whole"], tmp_path)
    process = start([*distil, *small, "--out", "killed"], tmp_path)
    wait_until((tmp_path / "killed" / "unfinished" / file).exists, START_S)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    said = run([*distil, *small, "--out", "killed"], tmp_path)
    assert "goes on with what is unfinished" in said
    whole, killed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(tensor, killed[name]) for name, tensor in whole.items())
