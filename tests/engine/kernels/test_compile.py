"""The kernels compile for the GPUs that they are for, and a thread's registers hold what it works on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia", reason="needs triton with ptxas: pip install triton")

ROOT = Path(__file__).parents[3]
TILES = (
    *("trees", "chains", "shared heads", "trees by window", "trees of a narrow cache"),
    *("trees in a pool for windows", "chains in a pool for windows"),
)
PROMPTS = ("prompts", "prompts by window", "prompts in a pool for windows", "prompts of a narrow cache")
LATENTS = (
    "latents of 128 heads",
    "latents",
    "latents as chains",
    "latents of a narrow cache",
    "latents of prompts",
    "latents of prompts and a narrow cache",
)
MOST_REGISTERS = {
    **{f"attend_tile {name}": 255 for name in (*PROMPTS, *LATENTS)},
    **{f"attend_tile {name}": 240 for name in TILES},
    "advance_delta_nets": 146,  # a state, the state before a tree, and what a token adds
    "advance_mamba2": 168,
}
SHARED_MEMORY = {"sm_89": 99 * 2**10, "sm_90": 227 * 2**10}  # bytes that a program may take


@pytest.mark.slow
def test_kernels_keep_what_they_work_on_in_registers(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.compiled"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert not run.returncode, run.stderr
    found = json.loads(run.stdout)
    print(found)
    assert len(found) == 136
    for name, used in found.items():
        kernel, _, capability = name.rpartition(" ")
        assert used["shared"] <= SHARED_MEMORY[capability], name
        assert used["spilled"] == 0, name
        if kernel.startswith("_multiply"):
            # One kind of instruction for any number of rows: a row's sums are then the same.
            assert bool(used["wgmma"]) == (capability == "sm_90"), name
            continue
        # So that two programs share a multiprocessor. A program that attends to a prompt or to latents has it
        # for itself.
        assert used["registers"] <= MOST_REGISTERS.get(kernel, 128), name
