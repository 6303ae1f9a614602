"""The pool for windowed layers on a GPU, which is simulated where there is none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import outrider.engine.forward.graphs
from outrider.decoding.draft import Draft
from outrider.decoding.settings import Sampling
from outrider.engine.loop.engine import Engine
from outrider.engine.planning.memory import Pools
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Decode, Decoded, plain_decoding
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_runs import run
from tests.support.gpu import gpu, left_empty
from tests.support.simulated_cuda.install import needs_compiler
from tests.support.simulated_cuda.steps import counts_of_step
from tests.support.windows import engine_with_pools, windows_of

pytestmark = needs_compiler

WINDOW, COUNT = 16, 12
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 64, "ignore_eos": True}
PROMPT = tuple(range(3, 63))  # almost four windows
# The last of two layers slides. Beside it, a layer with full attention stores all tokens.
SLIDING = {
    "num_hidden_layers": 2,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", **SLIDING)


def engine_on(folder: Path, device: str, pools: Pools) -> Engine:
    settings = EngineSettings(
        model=str(folder),
        device=device,
        dtype="float32",
        block_size=8,
        cache_memory=2**20,
        prefill_chunk=16,
        self_check=False,
        threads=1,
    )
    return engine_with_pools(settings, pools)


@pytest.fixture(scope="module")
def text(folder: Path) -> list[int]:
    """What a CPU says whose windowed layers keep all tokens."""
    return plain(engine_on(folder, "cpu", Pools(100)))


@pytest.fixture(scope="module")
def loaded(folder: Path, text: list[int]) -> Iterator[Engine]:
    with gpu(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(outrider.engine.forward.graphs, "CAPTURED_SIZES", (4, 20))
        yield engine_on(folder, "cuda", Pools(100, 30))


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    yield from left_empty(loaded)


def told(engine: Engine) -> list[int]:
    return [token for result in run(engine) if isinstance(result, Decoded) for token in result.verdict.tokens]


def plain(engine: Engine) -> list[int]:
    sequence = engine.open(len(PROMPT), 0, Sampling(**GREEDY))
    engine.submit(plain_decoding(sequence.number, 0, PROMPT, COUNT))
    tokens = told(engine)
    engine.close(sequence)
    return tokens


def test_text_is_the_cpu_s(engine: Engine, text: list[int]) -> None:
    assert plain(engine) == text
    pool = windows_of(engine).pool
    assert pool.available == pool.num_blocks


def test_branch_that_is_accepted_moves_in_windowed_layers_too(engine: Engine, text: list[int]) -> None:
    sequence = engine.open(len(PROMPT), 0, Sampling(**GREEDY))
    wrong = [(token + 1) % 256 for token in text]
    tree = Draft((wrong[0], text[0], wrong[1], text[1], text[2]), (-1, -1, 1, 1, 3))
    engine.submit(Decode(sequence.number, 0, PROMPT, tree, 1))
    tokens = told(engine)
    assert tokens == text[:4]
    engine.submit(plain_decoding(sequence.number, len(PROMPT) + 4, (), COUNT - 4))
    assert told(engine) == text[4:]
    engine.close(sequence)


def test_step_copies_and_waits_as_often_as_without_windows(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New blocks of the pool are a copy more, about once in a block of tokens."""
    monkeypatch.delitem(vars(engine), "step")  # it fills free blocks
    counts = counts_of_step(engine, 4, 5, Sampling(**GREEDY))
    totals = counts.totals()
    found = {kind: totals[kind] for kind in ("waits", "pageable_copies", "pinned_copies", "copies_out")}
    assert found == {"waits": 1, "pageable_copies": 0, "pinned_copies": 1, "copies_out": 1}, counts.report()
