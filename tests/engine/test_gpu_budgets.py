"""What a step may cost on a GPU beside arithmetic: launching, copying and waiting often take longer."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from outrider.decoding.settings import Sampling
from outrider.engine.engine import Engine
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import write_checkpoint
from tests.support.simulated_cuda.counts import Counts
from tests.support.simulated_cuda.install import needs_compiler, simulated_cuda
from tests.support.simulated_cuda.kernels import FA3
from tests.support.simulated_cuda.steps import counts_of_step

pytestmark = needs_compiler

# Of one step, whatever its shape. A blocking copy is a wait too.
BUDGET = {"waits": 1, "pageable_copies": 0, "pinned_copies": 1, "copies_out": 1}
SHAPES = {"1x1": (1, 1), "8x1": (8, 1), "8x5": (8, 5), "64x1": (64, 1)}  # sequences, and tokens of each
# How much more the second step may launch than the first: nothing.
FLAT = {
    ("sequences", "greedy"): ("1x1", "64x1"),
    ("sequences", "top-p"): ("1x1", "64x1"),
    ("rows", "greedy"): ("8x1", "8x5"),
    ("rows", "top-p"): ("8x1", "8x5"),
    ("branches", "greedy"): ("8x5", "8x5 tree"),
}
IN_MORE_LAYERS = ("8x5", "8x5 tree")  # the same
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1},
}
# The fastest way that there is.
SETTINGS: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "block_size": 8}
FLASH = FA3
LAYERS = (2, 4)

# What is beyond that today, with the reason: of every step, of a larger one, and in more layers.
OVER_BUDGET = {
    "waits": "every input is copied by itself, and waited for; so is every result",
    "pageable_copies": "inputs are not pinned",
    "copies_out": "tokens, soundness and finiteness are copied one by one",
}
NO_GRAPHS = "trees take neither the paged kernel nor graphs"
NOT_FLAT = {
    ("sequences", "greedy"): "a slice takes the place of rows where there is one",
    ("sequences", "top-p"): "ties are looked at row by row",
    ("rows", "top-p"): "ties are looked at row by row",
    ("branches", "greedy"): NO_GRAPHS,
}
NOT_FLAT_IN_LAYERS = {"8x5 tree": NO_GRAPHS}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Engine]]:
    """By their number of layers."""
    with simulated_cuda(flash=FLASH):
        made = {}
        for layers in LAYERS:
            folder = write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=layers)
            settings = EngineSettings(
                model=str(folder), cache_memory=2**22, prefill_chunk=1024, self_check=False, **SETTINGS
            )
            made[layers] = Engine.from_settings(settings)
        yield made


@pytest.fixture(scope="module")
def measured(engines: dict[int, Engine]) -> Callable[[str, str, int], Counts]:
    """Of a shape, sampling settings and a number of layers; each is measured once."""

    @cache
    def of(shape: str, sampling: str, layers: int = LAYERS[0]) -> Counts:
        sequences, tokens = SHAPES[shape.removesuffix(" tree")]
        settings = Sampling(max_tokens=64, ignore_eos=True, **SAMPLINGS[sampling])
        return counts_of_step(engines[layers], sequences, tokens, settings, branches=shape.endswith(" tree"))

    return of


def cases(names: Any, failing: Any) -> list[Any]:
    """As parameters of a test; those that fail today are expected to."""
    return [
        pytest.param(
            name, marks=pytest.mark.xfail(strict=True, reason=failing[name]) if name in failing else ()
        )
        for name in names
    ]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("shape", ["1x1", "8x5", "64x1", "8x5 tree"])
@pytest.mark.parametrize("kind", cases(BUDGET, OVER_BUDGET))
def test_a_step_stays_within_its_budget(measured, kind: str, shape: str, sampling: str) -> None:
    counts = measured(shape, sampling)
    assert counts.totals()[kind] <= BUDGET[kind], counts.report()


@pytest.mark.parametrize("shape", cases(IN_MORE_LAYERS, NOT_FLAT_IN_LAYERS))
def test_more_layers_launch_nothing_more(measured, shape: str) -> None:
    fewer, more = (measured(shape, "greedy", layers) for layers in LAYERS)
    assert more.totals() == fewer.totals(), more.report()


@pytest.mark.parametrize("case", cases(FLAT, NOT_FLAT), ids=" ".join)
def test_a_larger_step_launches_nothing_more(measured, case: tuple[str, str]) -> None:
    smaller, larger = (measured(shape, case[1]) for shape in FLAT[case])
    assert larger.launches.total() <= smaller.launches.total(), larger.report()
