"""Ranks with a GPU each replay their graphs, exchanges included, and say what one process says.

GPUs and NCCL are simulated: tests/support/simulated_cuda/README.md.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from outrider.decoding.settings import Sampling
from outrider.drafters.ngram import NgramIndex
from outrider.engine.drafters import early_exit, exit_search
from outrider.engine.drafters.target_drafters import TargetDrafters
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.follower import follow
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.offline.index import IndexDrafter
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import write_checkpoint
from tests.support.mtp import write_target
from tests.support.ranks import Ranks
from tests.support.ranks_on_gpus import few_graphs, follow_on, simulated
from tests.support.simulated_cuda.counts import Counts
from tests.support.simulated_cuda.install import needs_compiler
from tests.support.simulated_cuda.steps import counts_of_step
from tests.support.target_drafters import Drafted, drafter_of, drafters_with, rounds

pytestmark = needs_compiler

# A repeating prompt, so that n-grams find something to draft.
REQUESTS = [
    OfflineRequest((5, 9, 33, 5, 9, 33, 5, 9)[:length], Sampling(max_tokens=6, temperature=heat), length)
    for length, heat in ((8, 0.0), (3, 0.7))
]


def texts(engine: Engine) -> list[list[tuple[int, ...]]]:
    """Plainly, and with drafts."""
    drafters = None, IndexDrafter(NgramIndex)
    return [
        [output.tokens for output in generate(engine, drafter, REQUESTS, 3 if drafter else 0)]
        for drafter in drafters
    ]


def answer(group: RankGroup, settings: EngineSettings) -> tuple[Any, ...]:
    with few_graphs():
        engine = Engine.from_settings(settings, group)
    said = texts(engine)
    assert engine.last_step is not None
    counts = counts_of_step(engine, 2, 3, Sampling(temperature=0.0, max_tokens=64, ignore_eos=True))
    engine.shut_down()
    return said, engine.runner.slow_because, engine.last_step.path, counts.totals()


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_ranks_replay_graphs_and_say_what_one_process_says(
    gpu_ranks: Ranks, tmp_path: Path, batch_invariant: bool
) -> None:
    folder = write_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    fields = {"model": str(folder), "dtype": "float32", "cache_memory": 2**21, "self_check": False}
    alone = texts(Engine.from_settings(EngineSettings.model_validate(fields)))
    fields["batch_invariant"] = batch_invariant
    shared = EngineSettings.model_validate({**fields, "device": "cuda", "tensor_parallel": 2})
    [(said, slow_because, path, totals), waits_of_the_other] = gpu_ranks.run(answer, follow_on, shared)
    assert said == alone
    assert waits_of_the_other == 0
    assert slow_because == ()
    assert path == "graph"
    assert totals["waits"] == totals["pinned_copies"] == totals["copies_out"] == 1
    assert totals["pageable_copies"] == 0
    assert totals["launches"] <= 5  # the graph, what chooses and what verifies


def pass_of(
    group: RankGroup, settings: EngineSettings, sums_by_kernel: bool = False
) -> tuple[Counts, torch.Tensor]:
    """Returns counts and logits of a pass of three tokens that is launched kernel by kernel."""
    from outrider.engine.forward import cuda_operations  # needs triton

    capabilities = frozenset({torch.cuda.get_device_capability()} if sums_by_kernel else ())
    with patch.object(cuda_operations, "SUMS_ON", capabilities):
        forward = load_forward_pass(settings, group)
    with torch.inference_mode():
        step = StepInput.of(forward.tables, [Feed([5, 9, 33], 3, 0, HeldBlocks([0]), None)])
        batch = forward.prepare(step)
        simulated().counts = Counts()
        output = forward.run(batch)
    return simulated().counts, output.logits.cpu()


def settings_of_layers(folder: Path, layers: int, **fields: Any) -> EngineSettings:
    """Returns settings of two ranks of a model with that many layers."""
    model = write_checkpoint(folder / str(layers), "llama", num_hidden_layers=layers)
    given = {"device": "cuda", "dtype": "float16", "cache_memory": 2**21, "tensor_parallel": 2}
    rest = {"model": str(model), "self_check": False, "graphs": False, **fields}
    return EngineSettings.model_validate({**given, **rest})


def launches_of_a_layer(gpu_ranks: Ranks, folder: Path, *given: Any, **fields: Any) -> list[int]:
    """Returns the launches of a layer at each rank; prints them, and those beside the layers."""
    fewer, more = (
        [
            counts.launches.total()
            for counts, _ in gpu_ranks.run(
                pass_of, pass_of, settings_of_layers(folder, layers, **fields), *given
            )
        ]
        for layers in (2, 3)
    )
    found = [after - before for before, after in zip(fewer, more, strict=True)]
    beside = [before - 2 * of_a_layer for before, of_a_layer in zip(fewer, found, strict=True)]
    print(f"{fields}: launches of a rank: {found} a layer, {beside} beside the layers")
    return found


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(("batch_invariant", "budget"), [(False, 12), (True, 18)])
def test_layer_of_a_rank_stays_within_its_budget_of_launches(
    gpu_ranks: Ranks, tmp_path: Path, batch_invariant: bool, budget: int
) -> None:
    assert max(launches_of_a_layer(gpu_ranks, tmp_path, batch_invariant=batch_invariant)) <= budget


@pytest.mark.slow
def test_kernel_that_sums_ranks_saves_launches_and_changes_no_bit(gpu_ranks: Ranks, tmp_path: Path) -> None:
    assert max(launches_of_a_layer(gpu_ranks, tmp_path, True, batch_invariant=True)) <= 12
    settings = settings_of_layers(tmp_path, 2, batch_invariant=True)
    without, by_kernel = (gpu_ranks.run(pass_of, pass_of, settings, is_used) for is_used in (False, True))
    for (_, expected), (_, logits) in zip(without, by_kernel, strict=True):
        assert torch.equal(logits, expected)


def draft_beside(group: RankGroup, settings: EngineSettings) -> tuple[Any, ...]:
    with few_graphs():
        engine = Engine.from_settings(settings, group)
    assert engine.runner.slow_because == ()
    found = rounds(engine, [request.prompt for request in REQUESTS], 0.7, 3, alternatives=2)
    assert engine.last_step is not None
    cuda = simulated()
    cuda.counts = Counts()
    found += plain_between(engine)
    engine.shut_down()
    return found, engine.last_step.path, cuda.counts.busy_waits.total()


def plain_between(engine: Engine) -> list[Drafted]:
    """Texts one by one, of which some tokens are decoded plainly."""
    return [rounds(engine, [request.prompt], 0.7, 3, plain=PLAINLY)[0] for request in REQUESTS]


PLAINLY = 4, 14  # tokens from which on decoding is plain, and until which


def medusa(folder: Path) -> dict[str, str]:
    """Settings of a target with random heads."""
    model = write_checkpoint(folder / "target", "llama", num_hidden_layers=2)
    size = AutoConfig.from_pretrained(model).hidden_size
    (folder / "head").mkdir()
    tensors = {f"{head}.0.linear.weight": torch.randn(size, size) for head in range(3)}
    save_file(tensors, folder / "head" / "model.safetensors")
    (folder / "head" / "config.json").write_text("{}")
    return {"model": str(model), **drafters_with("medusa", folder / "head")}


def mtp(folder: Path) -> dict[str, str]:
    """Settings of a target with its own layer."""
    return {"model": str(write_target(folder, "qwen3")), **drafters_with("mtp")}


def first_layer(folder: Path) -> dict[str, Any]:
    """Settings of a target whose first layer drafts."""
    model = write_checkpoint(folder / "target", "llama", num_hidden_layers=2)
    return {"model": str(model), **drafters_with("early_exit", layers=1)}


@pytest.mark.slow
@pytest.mark.parametrize("write", [medusa, mtp, first_layer])
def test_ranks_replay_graphs_of_a_target_and_of_the_drafter_that_they_share(
    gpu_ranks: Ranks, tmp_path: Path, write: Callable[[Path], dict[str, Any]]
) -> None:
    """Graphs of rank 0 give a head the target's states, those of the others none: the exchanges are the same.

    Where decoding is plain the target's next step is launched before the head takes the one before in.
    """
    fields = {"dtype": "float32", "cache_memory": 2**21, "self_check": False, **write(tmp_path)}
    alone = Engine.from_settings(EngineSettings.model_validate(fields))
    expected = rounds(alone, [request.prompt for request in REQUESTS], 0.7, 3, alternatives=2)
    expected += plain_between(alone)
    shared = EngineSettings.model_validate({**fields, "device": "cuda", "tensor_parallel": 2})
    [(found, path, busy_waits), _] = gpu_ranks.run(draft_beside, follow_on, shared)
    assert [(text.tokens, text.drafts) for text in found] == [(text.tokens, text.drafts) for text in expected]
    assert any(text.drafts for text in found)
    assert path == "graph"
    assert busy_waits >= len(REQUESTS) * (PLAINLY[1] - PLAINLY[0] - 4), "rounds emit up to four at a time"


def search(group: RankGroup, settings: EngineSettings) -> tuple[list[tuple[int, ...]], int, Any, bool]:
    """Texts while a search takes all the time there is, Drafts of the last, what was found, and captured."""
    with patch.object(early_exit, "TRIAL_SHARE", 1e9), patch.object(exit_search, "POSITIONS", 16):
        with few_graphs():
            engine = Engine.from_settings(settings, group)
        found = [rounds(engine, [REQUESTS[0].prompt], 0.7, 3)[0] for _ in range(3)]
    drafter = drafter_of(engine)
    engine.shut_down()
    drafted = sum(map(len, found[-1].drafts))
    return [text.tokens for text in found], drafted, drafter._layers, drafter._graphs.is_complete


def captured_by_the_other(group: RankGroup, settings: EngineSettings) -> tuple[Any, bool]:
    with few_graphs():
        forward = load_forward_pass(settings, group, TargetDrafters.of(settings))
    follow(forward, group)
    drafter: Any
    (drafter,) = forward.drafters
    return drafter._layers, drafter._graphs.is_complete


@pytest.mark.slow
def test_part_that_rank_0_has_found_is_captured_by_all_ranks(gpu_ranks: Ranks, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "llama", num_hidden_layers=4)
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if ".layers.0." not in name and name.endswith(("o_proj.weight", "down_proj.weight")):
            weight *= 0.01  # so that the first layer says nearly always what all say
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    fields = {"dtype": "float32", "cache_memory": 2**21, "self_check": False, "model": str(model)}
    plain = Engine.from_settings(EngineSettings.model_validate(fields))
    (expected,) = rounds(plain, [REQUESTS[0].prompt], 0.7, 0)
    given = {**fields, "block_size": 8, "device": "cuda", "tensor_parallel": 2, **drafters_with("early_exit")}
    [(texts, drafted, layers, is_captured), other] = gpu_ranks.run(
        search, captured_by_the_other, EngineSettings.model_validate(given)
    )
    assert texts == [expected.tokens] * 3
    assert drafted > 0
    assert layers is not None
    assert is_captured
    assert other == (layers, True)


def raised(work: Callable[[], object]) -> str:
    try:
        work()
    except RuntimeError as error:
        return f"{error} {error.__context__}"
    return ""


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def rules(group: RankGroup, *_: object) -> tuple[Any, ...]:
    cuda = simulated()
    numbers = torch.ones(2, device="cuda")
    graph = captured(lambda: dist.all_reduce(numbers))
    before = numbers.tolist()
    graph.replay()
    graph.replay()
    cuda.counts = Counts()
    dist.all_reduce(numbers)
    totals = cuda.counts.totals()
    of_other_shape = torch.ones(2 + dist.get_rank(), device="cuda")
    return (
        before,
        numbers.tolist(),
        totals["launches"],
        totals["waits"],
        raised(lambda: dist.all_reduce(of_other_shape)),
        raised(lambda: captured(lambda: group.least(1))),
    )


def test_simulated_nccl_has_its_rules(gpu_ranks: Ranks) -> None:
    for before, after, launches, waits, other_shape, on_host in gpu_ranks.run(rules, rules):
        assert (before, after) == ([1.0, 1.0], [8.0, 8.0]), "a capture computes nothing, a replay does"
        assert (launches, waits) == (1, 0)
        assert "in different orders" in other_shape
        assert "not permitted when stream is capturing" in on_host
