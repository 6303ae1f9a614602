"""Under a lease the next round of a target with a drafter begins on the device, without the host.

The drafter is a model beside the target, which it resembles. Where the machine has no GPU it is simulated.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import outrider.engine.forward.graphs
from outrider.decoding.draft import Draft
from outrider.decoding.lease import Lease
from outrider.decoding.settings import Sampling
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.runner import ModelRunner
from outrider.engine.work import Decode
from tests.support.gpu import counted, gpu, left_empty
from tests.support.leased_rounds import (
    DEPTH,
    PROMPTS,
    SHARED,
    Asked,
    rounds_begun,
    settings_of_pair,
    texts,
    without_tokenizers,
    write_pair,
)
from tests.support.simulated_cuda.counts import Counts
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.install import needs_compiler

pytestmark = needs_compiler

LONG = tuple(range(5, 55))  # a prompt that is longer than a tile of few rows
# Launches of a step that reads a round, makes the next Drafts and begins the next round.
LAUNCHES = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module", autouse=True)
def pairs_without_tokenizers() -> Iterator[None]:
    with without_tokenizers():
        yield


@pytest.fixture(scope="module")
def on_cpu(folder: Path, pairs_without_tokenizers: None) -> Engine:
    return Engine.from_settings(settings_of_pair(folder, device="cpu"))


@pytest.fixture(scope="module")
def loaded(folder: Path, on_cpu: Engine) -> Iterator[tuple[Engine, SimulatedCuda | None]]:
    with gpu() as cuda, pytest.MonkeyPatch.context() as patched:
        patched.setattr(outrider.engine.forward.graphs, "CAPTURED_SIZES", (4, 16, 64))
        yield Engine.from_settings(settings_of_pair(folder, device="cuda")), cuda


@pytest.fixture
def engine(loaded: tuple[Engine, SimulatedCuda | None]) -> Iterator[Engine]:
    assert loaded[0].runner.slow_because == ()
    yield from left_empty(loaded[0])


@pytest.fixture
def cuda(loaded: tuple[Engine, SimulatedCuda | None]) -> SimulatedCuda:
    return counted(loaded[1])


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("alternatives", [0, 3])
def test_rounds_that_begin_on_the_device_are_those_of_the_host(
    engine: Engine, cuda: SimulatedCuda, on_cpu: Engine, alternatives: int
) -> None:
    """Texts of different lengths end while others go on, and a text joins them."""
    asked = [
        Asked(PROMPTS[0]),
        Asked(PROMPTS[1], {"temperature": 1.0, "top_p": 0.9, "max_tokens": 12}),
        Asked(PROMPTS[2], {"temperature": 0.0}, after=4),
    ]
    expected = texts(on_cpu, asked, alternatives)
    assert texts(engine, asked, alternatives) == expected
    assert max(len(verdict) for text in expected for verdict in text.verdicts) > 2
    assert any(text.off_chain for text in expected) == bool(alternatives)
    assert rounds_begun(cuda) > 3, cuda.counts.report()


@pytest.mark.slow
@pytest.mark.parametrize("alternatives", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_device_has_the_next_round_before_the_host_reads_a_verdict(
    engine: Engine, cuda: SimulatedCuda, alternatives: int
) -> None:
    """A step that was begun early costs two waits, and the device is busy at both."""
    counts: list[Counts] = []

    def count(step: int) -> None:
        counts.append(cuda.counts)
        cuda.counts = Counts()

    texts(engine, [Asked(prompt) for prompt in PROMPTS[:2]], alternatives, before_step=count)
    step = counts[3]
    totals = step.totals()
    assert totals["busy_waits"] == totals["waits"] == 2, step.report()
    assert totals["pinned_copies"] == totals["copies_out"] == 2, step.report()
    assert totals["pageable_copies"] == 0, step.report()
    assert totals["launches"] <= LAUNCHES + 8 * bool(alternatives), step.report()


@pytest.mark.slow
def test_sequence_that_needs_the_host_keeps_rounds_there_and_says_so(
    engine: Engine, cuda: SimulatedCuda, on_cpu: Engine
) -> None:
    """Once it has ended, the rounds of the other sequence begin on the device."""
    asked = [Asked(PROMPTS[0]), Asked(PROMPTS[1], {"repetition_penalty": 1.2, "max_tokens": 6})]
    begun: list[int] = []
    found = texts(engine, asked, before_step=lambda _: begun.append(rounds_begun(cuda)))
    assert found == texts(on_cpu, asked)
    assert [bool(text.of_host) for text in found] == [False, True]
    together = len(found[1].verdicts)
    assert begun[together] == 0 < begun[-1]


@pytest.mark.slow
def test_round_under_way_of_a_sequence_that_is_closed_harms_no_other(engine: Engine, on_cpu: Engine) -> None:
    """Its blocks go to a sequence that comes at once."""
    asked = [Asked(PROMPTS[0]), Asked(PROMPTS[2], after=4)]

    def close_another(step: int) -> None:
        if step == 0:
            sequence = engine.open(len(PROMPTS[1]), 9, Sampling(**SHARED))
            lease = Lease(400, DEPTH, 2, "colocated")
            engine.submit(Decode(sequence.number, 0, PROMPTS[1], Draft(), 1, lease))
            own.append(sequence)
        if step == 4:
            engine.close(own.pop())

    own: list[Any] = []
    expected = texts(on_cpu, asked, alternatives=2)
    step = engine.step

    def step_of_others(*given: Any) -> list[Any]:
        return [result for result in step(*given) if not own or result.sequence != own[0].number]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine, "step", step_of_others)
        assert texts(engine, asked, alternatives=2, before_step=close_another) == expected


@pytest.mark.slow
@pytest.mark.parametrize("alternatives", [0, 3])
def test_rounds_that_cannot_be_launched_begin_at_the_host(
    engine: Engine, on_cpu: Engine, monkeypatch: pytest.MonkeyPatch, alternatives: int
) -> None:
    """Each fails once its pass is over, which has written to the cache by then."""
    launch, failures = ModelRunner._launch_rounds, list[None]()

    def failing(*given: Any) -> None:
        launch(*given)
        failures.append(None)
        raise RuntimeError("of a test")

    asked = [Asked(PROMPTS[0])]
    with monkeypatch.context() as patched:
        patched.setattr(ModelRunner, "_launch_rounds", failing)
        found = texts(engine, asked, alternatives)
    assert failures
    assert found == texts(on_cpu, asked, alternatives)


@pytest.mark.slow
def test_rounds_go_as_far_as_their_lease(engine: Engine, cuda: SimulatedCuda, on_cpu: Engine) -> None:
    asked = [Asked(PROMPTS[0]), Asked(PROMPTS[1])]
    assert texts(engine, asked, leased=8) == texts(on_cpu, asked, leased=8)
    assert rounds_begun(cuda) > 0


@pytest.mark.slow
def test_new_sequence_reads_its_prompt_while_the_other_drafts_begin(
    engine: Engine, on_cpu: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step makes the Draft of a newcomer alone, for which the other sequences would have to wait."""
    asked = [Asked(PROMPTS[0]), Asked(LONG, after=3)]
    expected = texts(on_cpu, asked)

    def alone(*_: object) -> None:
        raise AssertionError("a Draft is made after its Verdict")

    with monkeypatch.context() as patched:
        patched.setattr(DraftModel, "propose_within", alone)
        assert texts(engine, asked) == expected
    assert expected[1].drafts[0], "with its first token"
