"""Draft-ahead on a GPU: a device goes on along its own guess, and prepares what a CPU prepares."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import outrider.engine.forward.graphs
from outrider.decoding.draft import Draft
from outrider.decoding.settings import Sampling
from outrider.engine.loop.engine import Engine
from outrider.engine.sequence import EngineSequence
from outrider.engine.work import PreparedTree, Propose, Proposed, Result
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.gpu import counted, draft_of, gpu, left_empty
from tests.support.simulated_cuda.counts import Counts
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.install import needs_compiler

pytestmark = needs_compiler

DEPTH = 2
PROMPTS = [(5, 9, 33, 5, 9, 33), (77, 12, 4, 8), (3, 4, 5)]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "ignore_eos": False, "stop_token_ids": tuple(range(3, 60))},
    {"temperature": 0.8, "repetition_penalty": 1.3},
]
LAUNCHES = 4  # launches of a step, beside a replay for each further position


def engine_of(folder: Path, device: str, branches: int = 1) -> Engine:
    return draft_of(folder, device, max_sequences=4, draft_ahead=branches)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[tuple[Engine, SimulatedCuda | None]]:
    with gpu() as cuda, pytest.MonkeyPatch.context() as patched:
        patched.setattr(outrider.engine.forward.graphs, "CAPTURED_SIZES", (1, 4, 16))
        yield engine_of(folder, "cuda"), cuda


@pytest.fixture
def engine(loaded: tuple[Engine, SimulatedCuda | None]) -> Iterator[Engine]:
    yield from left_empty(loaded[0])


@pytest.fixture
def cuda(loaded: tuple[Engine, SimulatedCuda | None]) -> SimulatedCuda:
    return counted(loaded[1])


def always() -> bool:
    return True


def opened(engine: Engine, place: int = 0) -> EngineSequence:
    sampling = Sampling(**{"max_tokens": 60, "ignore_eos": True, **SAMPLINGS[place]})
    return engine.open(len(PROMPTS[place]), place, sampling)


def proposed_until_idle(engine: Engine) -> dict[int, Draft]:
    """Runs until all Drafts are there; nothing is prepared in these steps."""
    drafts: dict[int, Draft] = {}
    while engine._queue.tasks or engine._queue.ready:
        drafts |= {result.sequence: result.draft for result in engine.step() if isinstance(result, Proposed)}
    return drafts


def run(engine: Engine, is_interrupted: Callable[[], bool] | None) -> list[Result]:
    results: list[Result] = []
    while engine.has_work:
        results += engine.step(is_interrupted)
    return results


def rounds(engine: Engine, is_interrupted: Callable[[], bool] | None = None) -> list[Any]:
    """Drafts and prepared trees of texts whose Verdicts fall by chance, often as was guessed."""
    rng, found = random.Random(3), list[Any]()
    sequences = [opened(engine, place) for place in range(len(PROMPTS))]
    texts: list[tuple[int, ...]] = [*PROMPTS]
    for _ in range(4):
        for sequence, text in zip(sequences, texts, strict=True):
            base = len(sequence.tokens)
            engine.submit(Propose(sequence.number, base, text[base:], DEPTH, base, alternatives=2))
        drafts = proposed_until_idle(engine)
        results = run(engine, is_interrupted)
        prepared = {result.sequence: result.draft for result in results if isinstance(result, PreparedTree)}
        found.append(
            ([drafts[each.number] for each in sequences], [prepared.get(e.number) for e in sequences])
        )
        for place, sequence in enumerate(sequences):
            draft, tree = drafts[sequence.number], prepared.get(sequence.number, Draft())
            chain = draft.tokens[: draft.chain_length]
            following = tree.after(chain).tokens
            if following and rng.random() < 0.5:
                texts[place] += (*chain, following[0])
            else:
                texts[place] += (*chain[: rng.randrange(len(chain) + 1)], rng.randrange(60, VOCAB_SIZE))
    for sequence in sequences:
        engine.close(sequence)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("is_interrupted", [None, always])
def test_prepared_drafts_of_the_device_are_those_of_the_cpu(
    engine: Engine, folder: Path, is_interrupted: Callable[[], bool] | None
) -> None:
    """Also if other work ends each step after a position."""
    found = rounds(engine, is_interrupted)
    assert found == rounds(engine_of(folder, "cpu"))
    assert sum(tree is not None for _, trees in found for tree in trees) > 4


def test_own_guess_is_prepared_with_one_copy_and_one_wait(engine: Engine, cuda: SimulatedCuda) -> None:
    sequence = opened(engine)
    engine.submit(Propose(sequence.number, 0, PROMPTS[0], DEPTH, 0))
    (draft,) = proposed_until_idle(engine).values()
    cuda.counts = Counts()
    (prepared,) = engine.step()
    assert isinstance(prepared, PreparedTree)
    totals = cuda.counts.totals()
    assert totals["waits"] == totals["pinned_copies"] == totals["copies_out"] == 1, cuda.counts.report()
    assert totals["launches"] <= LAUNCHES + DEPTH, cuda.counts.report()
    known = sequence.pending.tokens
    assert known[:DEPTH] == draft.tokens
    assert len(known) == 2 * DEPTH
    (own, *_) = sequence.draft.top_tokens[DEPTH - 1]
    engine.submit(Propose(sequence.number, len(PROMPTS[0]), (*draft.tokens, own), DEPTH, 1))
    (again,) = engine.step()
    assert isinstance(again, Proposed)
    assert again.timings.steps == 0
    assert len(again.draft) == DEPTH
    assert again.ahead is not None
    assert (again.ahead.tokens, again.ahead.wasted) == (DEPTH, 0)
    engine.close(sequence)


def test_sequence_that_needs_the_host_prepares_position_by_position(engine: Engine) -> None:
    sequence = opened(engine, 2)
    engine.submit(Propose(sequence.number, 0, PROMPTS[2], DEPTH, 0))
    proposed_until_idle(engine)
    before = len(sequence.pending)
    engine.step()
    assert len(sequence.pending) == before + 1
    assert engine.has_work
    engine.close(sequence)
