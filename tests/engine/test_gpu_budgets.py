"""What a step may cost on a GPU beside arithmetic: launching, copying and waiting often take longer."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import outrider.engine.forward.graphs
from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.settings import Sampling
from outrider.engine.choosing.sampler import choose_tokens
from outrider.engine.forward.batch_invariant import PASS_TOKENS
from outrider.engine.loop.engine import Engine
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.planning.step_costs import KERNELS_OF_PASS
from outrider.engine.settings import EngineSettings
from outrider.engine.work import plain_decoding
from tests.support.checkpoints import write_checkpoint
from tests.support.simulated_cuda.counts import Counts
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.graphs import KERNEL_MS
from tests.support.simulated_cuda.install import needs_compiler, simulated_cuda
from tests.support.simulated_cuda.steps import calls_of_step, counts_of_step
from tests.support.simulated_cuda.tensor import SimulatedTensor

pytestmark = needs_compiler

# Of one step, whatever its shape. A blocking copy is a wait too. One buffer is copied to the device: what a
# step feeds, and behind it how its tokens are chosen.
BUDGET = {"waits": 1, "pageable_copies": 0, "pinned_copies": 1, "copies_out": 1}
SHAPES = {
    "1x1": (1, 1),
    "1x5": (1, 5),
    "4x1": (4, 1),
    "4x2": (4, 2),
    "4x5": (4, 5),
    "16x1": (16, 1),
}  # sequences, and tokens of each
# How much more the second step may launch than the first: nothing.
FLAT = {
    ("sequences", "greedy"): ("1x1", "16x1"),
    ("sequences", "top-p"): ("1x1", "4x1"),
    ("rows", "logprobs"): ("4x2", "4x5"),
    ("rows", "greedy"): ("4x2", "4x5"),
    ("branches", "greedy"): ("4x5", "4x5 tree"),
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "logprobs": {"temperature": 0.8, "logprobs": 2},
}
# Calls by our own code, of functions in Python or C, for each further sequence of a step; a step of one.
CALLS_OF_A_SEQUENCE, CALLS_OF_A_STEP = 58, 410
# The fastest way that there is.
SETTINGS: dict[str, Any] = {"device": "cuda", "dtype": "float16", "block_size": 8}
LAYERS = (1, 2)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Engine]]:
    """Models by their number of layers."""
    with simulated_cuda(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(outrider.engine.forward.graphs, "CAPTURED_SIZES", (1, 4, 20))
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
    """Counts of a shape, sampling settings and a number of layers; each is measured once."""

    @cache
    def of(shape: str, sampling: str, layers: int = LAYERS[0]) -> Counts:
        sequences, tokens = SHAPES[shape.removesuffix(" tree")]
        settings = Sampling(max_tokens=64, ignore_eos=True, **SAMPLINGS[sampling])
        return counts_of_step(engines[layers], sequences, tokens, settings, branches=shape.endswith(" tree"))

    return of


@pytest.mark.parametrize(
    ("shape", "sampling"),
    [(shape, "greedy") for shape in ("1x1", "4x5", "4x5 tree")]
    + [("4x1", "top-p"), ("4x5", "logprobs")]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in (("16x1", "greedy"), ("1x1", "top-p"))],
)
@pytest.mark.parametrize("kind", BUDGET)
def test_step_stays_within_its_budget(measured, kind: str, shape: str, sampling: str) -> None:
    counts = measured(shape, sampling)
    assert counts.totals()[kind] <= BUDGET[kind], counts.report()


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"graphs": False}, id="without graphs"),
        pytest.param({"batch_invariant": True}, id="batch-invariant", marks=pytest.mark.slow),
    ],
)
def test_other_passes_copy_and_wait_as_often(
    engines: dict[int, Engine], monkeypatch: pytest.MonkeyPatch, more: dict[str, bool]
) -> None:
    monkeypatch.setitem(PASS_TOKENS, "cuda", 16)
    engine = Engine.from_settings(engines[LAYERS[0]].settings.model_copy(update=more))
    counts = counts_of_step(engine, 2, 3, Sampling(temperature=0.7, max_tokens=64, ignore_eos=True))
    totals = counts.totals()
    assert {kind: totals[kind] for kind in BUDGET} == BUDGET, counts.report()


@pytest.mark.slow
def test_step_with_a_chunk_of_a_prompt_beside_decoding_replays_a_graph(
    engines: dict[int, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outrider.engine.forward.graphs, "CAPTURED_SIZES", (1, 64))
    engine, paths = Engine.from_settings(engines[LAYERS[0]].settings), set()

    def step() -> None:
        engine.step()
        assert engine.last_step is not None
        paths.add((engine.last_step.path, engine.last_step.tokens))

    for length in (5, 40):
        sequence = engine.open(length, 0, Sampling(temperature=0.0, ignore_eos=True))
        engine.submit(plain_decoding(sequence.number, 0, (3,) * length, 8))
        step()
    while engine.has_work:
        step()
    assert {path for path, _ in paths} == {"graph"}
    assert ("graph", 41) in paths


def test_masks_of_grammars_are_one_copy_more(engines: dict[int, Engine]) -> None:
    cuda = SimulatedTensor.of
    assert isinstance(cuda, SimulatedCuda)
    logits, are_finite = torch.randn(3, 40).to("cuda"), torch.ones(3, dtype=torch.bool).to("cuda")
    mask = np.array([0b100, 0], np.int32)
    rows = [ChoiceContext(Sampling(), 5, place, (), (), mask=mask if place else None) for place in range(3)]
    cuda.counts = Counts()
    choices, _ = choose_tokens(logits, [rows[:1], rows[1:]], are_finite)
    assert choices[1].chosen == [2, 2]
    totals = cuda.counts.totals()
    # One that tells how tokens are chosen, which in a step comes with what it feeds.
    expected = BUDGET | {"pinned_copies": 2}
    assert {kind: totals[kind] for kind in BUDGET} == expected, cuda.counts.report()


@pytest.mark.parametrize(
    ("fewer", "more"),
    [("1x1", "16x1"), pytest.param("1x5", "4x5", marks=pytest.mark.slow)],
    ids=str,
)
def test_host_of_a_step_calls_few_functions_for_each_sequence(
    engines: dict[int, Engine], fewer: str, more: str
) -> None:
    sampling = Sampling(temperature=0.7, max_tokens=64, ignore_eos=True)
    few, many = (calls_of_step(engines[LAYERS[0]], *SHAPES[shape], sampling) for shape in (fewer, more))
    further = SHAPES[more][0] - SHAPES[fewer][0]
    growth = Counter({name: (many[name] - few[name]) / further for name in many})
    assert growth.total() <= CALLS_OF_A_SEQUENCE, growth.most_common(60)
    assert few.total() <= CALLS_OF_A_STEP, few.most_common(60)


@pytest.mark.slow
def test_more_layers_launch_nothing_more(measured) -> None:
    fewer, more = (measured("4x5 tree", "greedy", layers) for layers in LAYERS)
    assert more.totals() == fewer.totals(), more.report()


def test_plan_counts_the_kernels_of_a_pass(engines: dict[int, Engine]) -> None:
    for layers in LAYERS:
        settings = engines[layers].settings.model_copy(update={"graphs": False})
        counts = counts_of_step(
            Engine.from_settings(settings), 1, 1, Sampling(temperature=0.0, max_tokens=64)
        )
        planned = skeleton(settings).layer_kernels() + KERNELS_OF_PASS
        assert planned == counts.launches.total(), counts.report()


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("case", FLAT, ids=" ".join)
def test_larger_step_launches_nothing_more(measured, case: tuple[str, str]) -> None:
    smaller, larger = (measured(shape, case[1]) for shape in FLAT[case])
    assert larger.launches.total() <= smaller.launches.total(), larger.report()


def test_forward_pass_is_timed_by_the_device(engines: dict[int, Engine]) -> None:
    """The host's clock would tell how long launching took: a replay's launch is one, whatever is in it."""
    seconds = []
    for layers in LAYERS:
        counts_of_step(engines[layers], 1, 1, Sampling(temperature=0.0, max_tokens=64, ignore_eos=True))
        step = engines[layers].last_step
        assert step is not None
        assert step.total == pytest.approx(step.build + step.forward + step.sample)
        seconds.append(step.forward)
    fewer, more = (round(forward / KERNEL_MS * 1000) for forward in seconds)
    assert seconds == pytest.approx([count * KERNEL_MS / 1000 for count in (fewer, more)], rel=1e-6)
    assert 10 < more - fewer < 60, "kernels of a layer"
