"""Ranks with a GPU each replay their graphs, exchanges included, and say what one process says.

GPUs and NCCL are simulated: tests/support/simulated_cuda/README.md. Weights are shared out on CPUs and moved.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoConfig

import outrider.engine.forward.graphs
from outrider.decoding.settings import Sampling
from outrider.drafters.ngram import NgramIndex
from outrider.engine.drafters.index import IndexDrafter
from outrider.engine.engine import Engine
from outrider.engine.forward import forward_pass
from outrider.engine.forward.forward_pass import ForwardPass
from outrider.engine.loading.weights import load_model
from outrider.engine.parallel.follower import follow
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.settings import EngineSettings
from outrider.engine.speculate import Request, generate
from tests.support.beside import rounds
from tests.support.checkpoints import write_checkpoint
from tests.support.ranks import Ranks
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.install import needs_compiler
from tests.support.simulated_cuda.steps import counts_of_step
from tests.support.simulated_cuda.tensor import SimulatedTensor

pytestmark = needs_compiler

# A repeating prompt, so that n-grams find something to draft.
REQUESTS = [
    Request((5, 9, 33, 5, 9, 33, 5, 9)[:length], Sampling(max_tokens=6, temperature=heat), length)
    for length, heat in ((8, 0.0), (3, 0.7))
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(2, on_gpus=True)
    yield ranks
    ranks.close()


def moved(settings: EngineSettings) -> Any:
    return load_model(settings.model_copy(update={"device": "cpu"})).to("cuda")


def few_graphs() -> Any:
    return patch.object(outrider.engine.forward.graphs, "ROWS", (1, 4, 8))


def texts(engine: Engine) -> list[list[tuple[int, ...]]]:
    """Plainly, and with drafts."""
    drafters = None, IndexDrafter(NgramIndex)
    return [
        [output.tokens for output in generate(engine, drafter, REQUESTS, 3 if drafter else 0)]
        for drafter in drafters
    ]


def answer(group: RankGroup, settings: EngineSettings) -> tuple[Any, ...]:
    with patch.object(forward_pass, "load_model", moved), few_graphs():
        engine = Engine.from_settings(settings, group)
    said = texts(engine)
    assert engine.last_step is not None
    counts = counts_of_step(engine, 2, 3, Sampling(temperature=0.0, max_tokens=64, ignore_eos=True))
    engine.shut_down()
    return said, engine.slow_because, engine.last_step.path, counts.totals()


def follow_on(group: RankGroup, settings: EngineSettings) -> None:
    with patch.object(forward_pass, "load_model", moved), few_graphs():
        forward = ForwardPass(settings, group)
    follow(forward, group)


def test_ranks_replay_graphs_and_say_what_one_process_says(ranks: Ranks, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    fields = {"model": str(folder), "dtype": "float32", "cache_memory": 2**21, "self_check": False}
    alone = texts(Engine.from_settings(EngineSettings.model_validate(fields)))
    shared = EngineSettings.model_validate({**fields, "device": "cuda", "tensor_parallel": 2})
    [(said, slow_because, path, totals), _] = ranks.run(answer, follow_on, shared)
    assert said == alone
    assert slow_because == ()
    assert path == "graph"
    assert totals["waits"] == totals["copies_out"] == 1
    assert totals["launches"] <= 5  # the graph, what chooses and what verifies


def draft_beside(group: RankGroup, settings: EngineSettings) -> tuple[Any, ...]:
    with patch.object(forward_pass, "load_model", moved), few_graphs():
        engine = Engine.from_settings(settings, group)
    found = rounds(engine, [request.prompt for request in REQUESTS], 0.7, 3, leaves=2)
    assert engine.last_step is not None
    engine.shut_down()
    return found, engine.last_step.path


@pytest.mark.slow
def test_ranks_replay_graphs_with_heads_beside_the_first(ranks: Ranks, tmp_path: Path) -> None:
    """Its graphs give states, those of the others none: the exchanges in them are the same."""
    folder = write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=2)
    config = AutoConfig.from_pretrained(folder)
    tensors = {
        f"{head}.0.linear.weight": torch.randn(config.hidden_size, config.hidden_size) for head in range(3)
    }
    (tmp_path / "head").mkdir()
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    (tmp_path / "head" / "config.json").write_text("{}")
    fields = {"model": str(folder), "dtype": "float32", "cache_memory": 2**21, "self_check": False}
    fields |= {"drafter": "medusa", "head": str(tmp_path / "head")}
    alone = Engine.from_settings(EngineSettings.model_validate(fields))
    expected = rounds(alone, [request.prompt for request in REQUESTS], 0.7, 3, leaves=2)
    shared = EngineSettings.model_validate({**fields, "device": "cuda", "tensor_parallel": 2})
    [(found, path), _] = ranks.run(draft_beside, follow_on, shared)
    assert [(one.tokens, one.drafts) for one in found] == [(one.tokens, one.drafts) for one in expected]
    assert any(one.drafts for one in found)
    assert path == "graph"


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
    cuda = SimulatedTensor.of
    assert isinstance(cuda, SimulatedCuda)
    numbers = torch.ones(2, device="cuda")
    graph = captured(lambda: dist.all_reduce(numbers))
    before = numbers.tolist()
    graph.replay()
    graph.replay()
    cuda.counts = type(cuda.counts)()
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


def test_the_simulated_nccl_has_its_rules(ranks: Ranks) -> None:
    for before, after, launches, waits, other_shape, on_host in ranks.run(rules, rules):
        assert (before, after) == ([1.0, 1.0], [8.0, 8.0]), "a capture computes nothing, a replay does"
        assert (launches, waits) == (1, 0)
        assert "in different orders" in other_shape
        assert "not permitted when stream is capturing" in on_host
