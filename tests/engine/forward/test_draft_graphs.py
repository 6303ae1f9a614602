"""A Draft is a program of the device: one copy in, one wait and one copy out, however deep it is."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider.engine.forward.graphs
from outrider.decoding.settings import Sampling
from outrider.engine.forward.graphs import draft_bytes
from outrider.engine.inputs.context_parts import SHORTEST
from outrider.engine.loop import launched
from outrider.engine.loop.engine import Engine
from outrider.engine.work import Propose, Proposed, Result
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.gpu import counted, draft_of, gpu, left_empty
from tests.support.model import forward_of, model_of
from tests.support.simulated_cuda.counts import Counts
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.install import needs_compiler
from tests.support.simulated_cuda.tensor import numbers_of

pytestmark = needs_compiler

SIZES = (2, 8, 16, 64)  # rows of the captured graphs
ALL: dict[str, Any] = {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.01}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "all": ALL,
    "ends": {"temperature": 1.0, "ignore_eos": False, "stop_token_ids": tuple(range(3, 90))},
    "bans": {"temperature": 0.8, "bad_token_ids": tuple(range(3, 50))},
    "reads": {"temperature": 0.8, "repetition_penalty": 1.3},
}


def always() -> bool:
    return True


def engine_of(folder: Path, device: str) -> Engine:
    return draft_of(folder, device, max_sequences=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[tuple[Engine, SimulatedCuda | None]]:
    with gpu() as cuda, pytest.MonkeyPatch.context() as patched:
        patched.setattr(outrider.engine.forward.graphs, "CAPTURED_SIZES", SIZES)
        yield engine_of(folder, "cuda"), cuda


@pytest.fixture
def engine(loaded: tuple[Engine, SimulatedCuda | None]) -> Iterator[Engine]:
    """A draft on a GPU; no sequence is open before and after."""
    assert loaded[0].runner.slow_because == ()
    yield from left_empty(loaded[0])


@pytest.fixture
def cuda(loaded: tuple[Engine, SimulatedCuda | None]) -> SimulatedCuda:
    return counted(loaded[1])


def run(engine: Engine, is_interrupted: Callable[[], bool] | None = None) -> list[Result]:
    results: list[Result] = []
    while engine.has_work:
        results += engine.step(is_interrupted)
    return results


class Sequences:
    """Texts, each of which goes on by a part of its Draft and then by another token."""

    def __init__(self, engine: Engine, samplings: list[str], long: int | None = None) -> None:
        """long: sequence whose context has several parts; None: all have a single part."""
        self._engine, self._rng = engine, random.Random(3)
        given = [Sampling(**{"max_tokens": 90, "ignore_eos": True, **SAMPLINGS[name]}) for name in samplings]
        lengths = [SHORTEST + 1 if place == long else 6 for place in range(len(given))]
        self._texts = [tuple(self._rng.choices(range(3, VOCAB_SIZE), k=length)) for length in lengths]
        pairs = zip(lengths, given, strict=True)
        self._opened = [engine.open(length, number, one) for number, (length, one) in enumerate(pairs)]

    def submit(self, depths: list[int]) -> None:
        """Asks for Drafts."""
        for sequence, text, depth in zip(self._opened, self._texts, depths, strict=True):
            base = len(sequence.tokens)
            work = Propose(sequence.number, base, text[base:], depth, base, alternatives=3)
            self._engine.submit(work)

    def drafts(self, depths: list[int], is_interrupted: Callable[[], bool] | None = None) -> list[Any]:
        """Returns what is drafted, and what each sequence then holds of it."""
        self.submit(depths)
        results = run(self._engine, is_interrupted)
        found = {result.sequence: result.draft for result in results if isinstance(result, Proposed)}
        self._drafts = [found[sequence.number] for sequence in self._opened]
        held = [(sequence.pending, dict(sequence.draft.top_tokens)) for sequence in self._opened]
        return [*zip(self._drafts, held, strict=True)]

    def go_on(self, unfed: bool | None = None) -> None:
        """unfed: by the whole Draft, whose last token was never fed, or by none of it. None: by chance."""
        for place, draft in enumerate(self._drafts):
            chain = draft.tokens[: draft.chain_length]
            count = self._rng.randrange(len(chain) + 1) if unfed is None else unfed * len(chain)
            self._texts[place] += (*chain[:count], self._rng.randrange(3, VOCAB_SIZE))

    def close(self) -> None:
        for sequence in self._opened:
            self._engine.close(sequence)


def rounds(
    engine: Engine, samplings: list[str], depths: list[int], long: int | None = None, single: bool = False
) -> list[Any]:
    sequences, found = Sequences(engine, samplings, long), []
    for _ in range(2):
        found += sequences.drafts(depths, always if single else None)
        sequences.go_on()
    sequences.close()
    return found


@pytest.mark.slow
def test_draft_finds_its_kernels_compiled(engine: Engine, cuda: SimulatedCuda) -> None:
    """The first test of this file: the others may compile more."""
    loaded = set(cuda.compiled)
    rounds(engine, ["greedy", "all", "plain"], [3, 3, 3])
    assert not cuda.compiled - loaded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("samplings", "depths", "long"),
    [
        pytest.param(["greedy"], [16], None, marks=pytest.mark.slow),
        (["plain", "all", "greedy", "ends"], [2, 4, 4, 3], 1),
        pytest.param(["reads", "plain", "bans", "all"], [3, 4, 2, 1], None, marks=pytest.mark.slow),
    ],
)
def test_drafts_of_the_device_are_those_made_position_by_position(
    engine: Engine, folder: Path, samplings: list[str], depths: list[int], long: int | None
) -> None:
    """Bit for bit those of the device, and those of a CPU."""
    found = rounds(engine, samplings, depths, long)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(forward_of(engine), "draft_graphs", None)
        assert found == rounds(engine, samplings, depths, long, single=True)
    assert found == rounds(engine_of(folder, "cpu"), samplings, depths, long)


# Launches beside a replay for each further position: the first pass, its choice, and what follows from it.
LAUNCHES = {"greedy": 4, "plain": 4, "all": 5}  # truncation takes a launch more


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("depth", [2, *(pytest.param(depth, marks=pytest.mark.slow) for depth in (4, 8))])
@pytest.mark.parametrize(
    ("count", "sampling"),
    [
        (1, "plain"),
        (8, "all"),
        pytest.param(8, "greedy", marks=pytest.mark.slow),
        pytest.param(64, "greedy", marks=pytest.mark.slow),
    ],
)
def test_draft_copies_and_waits_once_however_deep_it_is(
    engine: Engine, cuda: SimulatedCuda, count: int, sampling: str, depth: int
) -> None:
    sequences = Sequences(engine, [sampling] * count)
    sequences.drafts([depth] * count)
    for several in (False, True)[: 1 + (count < SIZES[-1])]:  # there is no graph of more rows
        sequences.go_on(unfed=several)
        cuda.counts = Counts()
        sequences.drafts([depth] * count)
        totals = cuda.counts.totals()
        assert totals["waits"] == totals["pinned_copies"] == totals["copies_out"] == 1, cuda.counts.report()
        assert totals["pageable_copies"] == 0, cuda.counts.report()
        assert totals["launches"] <= LAUNCHES[sampling] + depth - 1, cuda.counts.report()


def test_drafts_of_different_depths_are_one_program(engine: Engine, cuda: SimulatedCuda) -> None:
    depths = [1, 4, 8, 2]
    sequences = Sequences(engine, ["plain", "greedy", "all", "greedy"])
    sequences.drafts(depths)
    sequences.go_on()
    cuda.counts = Counts()
    drafts = [draft for draft, _ in sequences.drafts(depths)]
    totals = cuda.counts.totals()
    assert [draft.chain_length for draft in drafts] == depths
    assert totals["waits"] == totals["pinned_copies"] == totals["copies_out"] == 1, cuda.counts.report()
    assert totals["launches"] <= LAUNCHES["all"] + max(depths) - 1, cuda.counts.report()


@pytest.mark.parametrize("sampling", ["reads", pytest.param("bans", marks=pytest.mark.slow)])
def test_sequence_that_needs_the_host_costs_no_other_sequence_its_program(
    engine: Engine, sampling: str
) -> None:
    """Whoever needs no host has its Draft after the first step."""
    depths = [4, 4, 4]
    sequences = Sequences(engine, ["plain", sampling, "all"])
    sequences.drafts(depths)
    sequences.go_on()
    sequences.submit(depths)
    numbers = [sequence.number for sequence in sequences._opened]
    assert [result.sequence for result in engine.step()] == [numbers[0], numbers[2]]
    assert [result.sequence for result in run(engine)] == [numbers[1]]


def test_step_that_is_interrupted_ends_with_the_position_that_the_device_works_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never ends its first position, so it is given no other. The Draft is what it is without a break."""
    sequences = Sequences(engine, ["plain"])
    ((expected, _),) = sequences.drafts([5])
    sequences.close()
    asked = 0

    def is_interrupted() -> bool:
        nonlocal asked
        asked += 1
        return asked == 20

    again = Sequences(engine, ["plain"])
    again.submit([5])
    with monkeypatch.context() as patched:
        patched.setattr(launched, "is_over", lambda moment: False)
        assert engine.step(is_interrupted) == []
    (sequence,) = engine._sequences.values()
    assert len(sequence.draft.top_tokens) == 1
    (proposed,) = run(engine)
    assert isinstance(proposed, Proposed)
    assert proposed.draft == expected
    assert proposed.timings.steps == 5


def test_draft_graphs_keep_what_was_planned(engine: Engine) -> None:
    forward = forward_of(engine)
    graphs = forward.draft_graphs
    assert graphs is not None
    tensors = [graphs._every]
    for memory in graphs._memories.values():
        paged = {name: field for name, field in vars(memory.paged).items() if name != "block_tables"}
        tensors += [memory.progress, memory.found, *paged.values(), memory.rows.numbers]
    held = [numbers_of(tensor).untyped_storage() for tensor in tensors]
    kept = sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())
    assert kept == draft_bytes(engine.settings)


@contextmanager
def poisoned(engine: Engine, token: int) -> Iterator[None]:
    """Context in which the token's embedding is no number."""
    embedding = model_of(engine).get_input_embeddings().weight
    with torch.no_grad():
        healthy = embedding[token].clone()
        embedding[token] = torch.nan
        yield
        embedding[token] = healthy


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the interpreter
@pytest.mark.parametrize("ends", [pytest.param(False, marks=pytest.mark.slow), True])
def test_numbers_that_are_not_finite_cost_the_sequence_that_feeds_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """A token that ends a Draft is fed by the device alone: it costs nothing, and is left nowhere."""
    sequences = Sequences(engine, ["greedy", "greedy"])
    (healthy, _), (harmed, _) = sequences.drafts([5, 5])
    sequences.close()
    poison = next(token for token in harmed.tokens[1:4] if token not in healthy.tokens)
    stop = {"temperature": 0.0, "ignore_eos": False, "stop_token_ids": (poison,)}
    monkeypatch.setitem(SAMPLINGS, "stop", stop)
    with poisoned(engine, poison):
        again = Sequences(engine, ["greedy", "stop" if ends else "greedy"])
        again.submit([5, 5])
        drafts = {result.sequence: getattr(result, "draft", None) for result in run(engine)}
    other = Sequences(engine, ["greedy"])
    other.drafts([1])
    assert all(stored.isfinite().all() for stored in engine._cache.values.values())
    first, second = (drafts[number] for number in sorted(drafts))
    assert first == healthy
    known = harmed.tokens[: 1 + harmed.tokens.index(poison)]
    assert (second and second.tokens[: second.chain_length]) == (known if ends else None)
    last = Sequences(engine, ["greedy", "greedy"])
    assert [draft for draft, _ in last.drafts([5, 5])] == [healthy, harmed]
