"""`python -m bench gpu` runs from end to end, on a simulated GPU where there is no other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import outrider.engine.forward.graphs
from bench import checkpoints, gpu
from tests.support.gpu import gpu as any_gpu
from tests.support.simulated_cuda.install import needs_compiler

pytestmark = needs_compiler

SMALL: dict[str, Any] = {
    "SHAPES": ((2, 3),),
    "FEW_SHAPES": ((2, 3),),
    "TREE": (2, 3),
    "PROMPT": range(10, 14),
    "CHUNKS": (16,),
    "BUFFER_BYTES": 2**16,
    "REPETITIONS": 4,
    "CACHE": 2**24,
    "DTYPE": "float16",  # bfloat16 is wrong in Triton's interpreter
}


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the benchmark saves last."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(checkpoints, "FOLDER", tmp_path)
    monkeypatch.setattr(outrider.engine.forward.graphs, "CAPTURED_SIZES", (1, 6))
    for name, value in SMALL.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(gpu, "save", lambda _name, _rows, **facts: found.update(facts))
    checkpoints.llama("tiny", "cpu")  # a simulated tensor cannot be saved
    with any_gpu():
        yield found


@pytest.mark.slow
def test_every_part_says_which_way_its_steps_went(saved: dict[str, Any]) -> None:
    gpu.main(["--models", "tiny", "--prompts", "20"])
    paths = {row["asked"]: row["path"] for row in saved["steps"]}
    assert paths == {"graphs": "graph", "no graphs": "kernels", "batch_invariant": "graph"}
    assert {row["draft"] for row in saved["steps"]} == {"chain", "tree"}
    assert [row["prompt"] for row in saved["prompts"]] == [20]
