"""A step of plain decoding on a GPU is launched before the host knows the tokens of the step before.

Where the machine has none it is simulated: see tests/support/simulated_cuda/README.md.
"""

from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider.engine.forward.graphs
from outrider.decoding.draft import Draft
from outrider.decoding.settings import Sampling
from outrider.engine.forward.output import ForwardOutput
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.runner import ModelRunner
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Decode, Decoded, Failed, Result, plain_decoding
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_runs import run
from tests.support.gpu import counted, gpu, left_empty
from tests.support.model import model_of
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.graphs import KERNEL_MS
from tests.support.simulated_cuda.install import needs_compiler

pytestmark = needs_compiler

COUNT = 6
PLAIN: dict[str, Any] = {"temperature": 0.7, "max_tokens": COUNT, "ignore_eos": True}
PROMPTS = [tuple(range(start, start + 6)) for start in (3, 40, 80, 120)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=1)


def engine_of(folder: Path, device: str) -> Engine:
    return Engine.from_settings(
        EngineSettings(
            model=str(folder),
            device=device,
            dtype="float32",
            block_size=8,
            cache_memory=2**20,
            prefill_chunk=16,
            self_check=False,
        )
    )


@pytest.fixture(scope="module")
def texts(folder: Path) -> list[list[int]]:
    """Text that the CPU says to each prompt."""
    engine = engine_of(folder, "cpu")
    return [alone(engine, prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def loaded(folder: Path, texts: list[list[int]]) -> Iterator[tuple[Engine, SimulatedCuda | None]]:
    with gpu() as cuda, pytest.MonkeyPatch.context() as patched:
        patched.setattr(outrider.engine.forward.graphs, "CAPTURED_SIZES", (4, 16))
        yield engine_of(folder, "cuda"), cuda


@pytest.fixture
def engine(loaded: tuple[Engine, SimulatedCuda | None]) -> Iterator[Engine]:
    """An engine on a GPU; no sequence is open before and after."""
    yield from left_empty(loaded[0])


@pytest.fixture
def cuda(loaded: tuple[Engine, SimulatedCuda | None]) -> SimulatedCuda:
    return counted(loaded[1])


def start(engine: Engine, prompt: tuple[int, ...], count: int = COUNT, **sampling: Any) -> int:
    """A text that goes on by so many tokens at first. Returns its number."""
    sequence = engine.open(len(prompt), len(prompt) + prompt[0], Sampling(**{**PLAIN, **sampling}))
    engine.submit(plain_decoding(sequence.number, 0, prompt, count))
    return sequence.number


def text(results: list[Result], number: int) -> list[int]:
    return [
        result.verdict.tokens[-1]
        for result in results
        if isinstance(result, Decoded) and result.sequence == number
    ]


def alone(engine: Engine, prompt: tuple[int, ...]) -> list[int]:
    number = start(engine, prompt)
    return text(run(engine), number)


def test_next_step_is_launched_before_the_tokens_of_this_step_are_read(
    engine: Engine, cuda: SimulatedCuda
) -> None:
    """All but the last, after which there is none."""
    for prompt in PROMPTS[:2]:
        start(engine, prompt)
    results = run(engine)
    steps = [result.timings.last_step for result in results if isinstance(result, Decoded)]
    assert [step.is_early for step in steps[::2]] == [False, *[True] * (COUNT - 1)]
    assert cuda.counts.waits.total() == COUNT, cuda.counts.report()
    assert cuda.counts.busy_waits.total() == COUNT - 1, cuda.counts.report()
    assert cuda.counts.pageable_copies.total() == 0
    assert cuda.counts.pinned_copies.total() == COUNT
    assert cuda.counts.copies_out.total() == COUNT


def _verify(engine: Engine) -> None:
    sequence = engine.open(len(PROMPTS[1]), 1, Sampling(**PLAIN))
    engine.submit(Decode(sequence.number, 0, PROMPTS[1], Draft.chain((5, 6)), 1))


COMPANY: dict[str, Callable[[Engine], object]] = {
    "a penalty": lambda engine: start(engine, PROMPTS[1], repetition_penalty=1.2),
    "processed logprobs": lambda engine: start(engine, PROMPTS[1], logprobs=1, logprobs_of="processed"),
    "a Draft": _verify,
    "a long prompt": lambda engine: start(engine, tuple(range(3, 90)), 1),
}


@pytest.mark.parametrize(
    "kind",
    ["a penalty", *(pytest.param(kind, marks=pytest.mark.slow) for kind in COMPANY if kind != "a penalty")],
)
def test_step_that_depends_on_the_host_waits_for_it(engine: Engine, cuda: SimulatedCuda, kind: str) -> None:
    start(engine, PROMPTS[0], 3)
    COMPANY[kind](engine)
    steps = 0
    while len(engine._queue.tasks) > 1:
        engine.step()
        steps += 1
        assert cuda.issued == cuda.done, "the device was given more"
    assert steps
    assert not cuda.counts.busy_waits


def test_log_probabilities_come_with_the_tokens(engine: Engine, cuda: SimulatedCuda, folder: Path) -> None:
    """Where one sequence asks for some the next step is launched early too, into the memory of the logits."""

    def told(engine: Engine) -> list[tuple[int, float, list[int], list[float]]]:
        start(engine, PROMPTS[0])
        number = start(engine, PROMPTS[1], logprobs=2)
        own = [result for result in run(engine) if isinstance(result, Decoded) and result.sequence == number]
        return [
            (
                result.verdict.tokens[-1],
                of_token.chosen,
                [token for token, _ in of_token.top],
                [*map(itemgetter(1), of_token.top)],
            )
            for result in own
            for of_token in result.logprobs
        ]

    by_cpu, by_gpu = told(engine_of(folder, "cpu")), told(engine)
    assert len(by_gpu) == COUNT
    for expected, found in zip(by_cpu, by_gpu, strict=True):
        assert (found[0], found[2]) == (expected[0], expected[2])
        assert [found[1], *found[3]] == pytest.approx([expected[1], *expected[3]], abs=1e-4)
    assert cuda.counts.waits.total() == COUNT, cuda.counts.report()
    assert cuda.counts.busy_waits.total() == COUNT - 1, cuda.counts.report()
    assert cuda.counts.pageable_copies.total() == 0
    assert cuda.counts.copies_out.total() == COUNT


BY_POSITION: dict[str, dict[str, Any]] = {
    "min_tokens": {"min_tokens": 4, "ignore_eos": False, "stop_token_ids": tuple(range(3, 100))},
    "logit_bias": {"logit_bias": {7: 4.0, 9: 5.0}},
    "allowed_token_ids": {"allowed_token_ids": (7, 8, 9, 10)},
    "bad_token_ids": {"bad_token_ids": tuple(range(3, 90))},
}


@pytest.mark.parametrize(
    "setting",
    [
        "min_tokens",
        *(pytest.param(name, marks=pytest.mark.slow) for name in BY_POSITION if name != "min_tokens"),
    ],
)
def test_change_by_the_number_of_tokens_alone_is_foreseen(
    engine: Engine, cuda: SimulatedCuda, folder: Path, setting: str
) -> None:
    """Beside a sequence without the setting."""

    def both(engine: Engine) -> list[list[int]]:
        numbers = [start(engine, PROMPTS[0]), start(engine, PROMPTS[1], **BY_POSITION[setting])]
        results = run(engine)
        return [text(results, number) for number in numbers]

    on_cpu = engine_of(folder, "cpu")
    expected = both(on_cpu)
    assert expected[1] != alone(on_cpu, PROMPTS[1])
    assert both(engine) == expected
    assert cuda.counts.busy_waits.total() == COUNT - 1, cuda.counts.report()
    assert cuda.counts.pageable_copies.total() == 0, cuda.counts.report()


def test_new_sequence_joins_the_step_after_the_running_step(engine: Engine, texts: list[list[int]]) -> None:
    first = start(engine, PROMPTS[0])
    results = [*engine.step(), *engine.step()]
    second = start(engine, PROMPTS[1])
    results += [*engine.step(), *engine.step()]
    assert [len(text(results, number)) for number in (first, second)] == [4, 1]
    results += run(engine)
    assert [text(results, number) for number in (first, second)] == texts[:2]


def test_steps_that_overlap_are_not_counted_twice(engine: Engine, cuda: SimulatedCuda) -> None:
    number = start(engine, PROMPTS[0])
    results: list[Result] = []
    seconds: list[float] = []
    for _ in range(COUNT):
        results += engine.step()
        last = engine.last_step
        assert last is not None
        seconds.append(last.total)
        assert min(last.build, last.forward, last.sample) >= 0.0
        assert last.build + last.forward + last.sample == pytest.approx(last.total)
    of_kernels = [step / KERNEL_MS * 1000 for step in seconds[2:]]  # the first is by the host's clock
    assert max(of_kernels) == pytest.approx(min(of_kernels), abs=0.5)
    assert 10 < min(of_kernels) < 100, "kernels of one step"
    timings = [
        result.timings for result in results if isinstance(result, Decoded) and result.sequence == number
    ]
    assert [timing.steps for timing in timings] == [1] * COUNT
    assert min(timing.queue for timing in timings) >= 0.0
    assert all(timing.step <= timing.total for timing in timings)
    steps = [timing.last_step.number for timing in timings]
    assert steps == [*range(steps[0], steps[0] + COUNT)]


def after_passes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, see: Callable[[ForwardOutput, bool], None]
) -> None:
    """Shows the output of every forward pass, and whether it was launched early. ``see`` may raise."""
    assert isinstance(engine.runner, ModelRunner)
    forward = engine.runner._forward
    run_pass = forward.run

    def seen(step: Any, chosen: torch.Tensor | None = None) -> ForwardOutput:
        output = run_pass(step, chosen)
        see(output, chosen is not None)
        return output

    monkeypatch.setattr(forward, "run", seen)


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError(),
        pytest.param(torch.OutOfMemoryError("CUDA out of memory"), marks=pytest.mark.slow),
    ],
)
def test_failed_early_launch_harms_no_sequence(
    engine: Engine, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    failed = 0

    def harm(_: ForwardOutput, is_early: bool) -> None:
        nonlocal failed
        if is_early:
            failed += 1
            raise error

    after_passes(engine, monkeypatch, harm)
    monkeypatch.setattr(engine.runner, "launches_early", True)  # which is put back
    numbers = [start(engine, prompt) for prompt in PROMPTS[:2]]
    results = run(engine)
    assert [text(results, number) for number in numbers] == texts[:2]
    assert failed == (1 if isinstance(error, torch.OutOfMemoryError) else COUNT - 1)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the interpreter
def test_numbers_that_are_not_finite_cost_the_sequence_that_they_come_from(
    engine: Engine, texts: list[list[int]]
) -> None:
    """A token in the middle of a text, fed by a step that was launched before anybody knew it."""
    poison = next(token for token in texts[1][1:-2] if token not in {*texts[0], *PROMPTS[0], *PROMPTS[1]})
    embedding = model_of(engine).get_input_embeddings().weight
    with torch.no_grad():
        healthy = embedding[poison].clone()
        embedding[poison] = torch.nan
        numbers = [start(engine, prompt) for prompt in PROMPTS[:2]]
        results = run(engine)
        embedding[poison] = healthy
    assert [result.sequence for result in results if isinstance(result, Failed)] == numbers[1:]
    until = texts[1].index(poison) + 1
    assert [text(results, number) for number in numbers] == [texts[0], texts[1][:until]]
    assert alone(engine, PROMPTS[2]) == texts[2]
    assert all(values.isfinite().all() for values in engine._cache.values.values())


def test_tokens_after_a_token_chosen_anew_are_forgotten(
    engine: Engine, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is not finite in company, and is once its sequence runs alone."""
    passes = 0

    def spoil(output: ForwardOutput, _: bool) -> None:
        nonlocal passes
        passes += 1
        if passes == 3:
            output.logits[1] = torch.nan

    after_passes(engine, monkeypatch, spoil)
    numbers = [start(engine, prompt) for prompt in PROMPTS[:2]]
    results = run(engine)
    assert [text(results, number) for number in numbers] == texts[:2]
    assert passes == COUNT + 2, "one sequence alone, and the step after once more"


@pytest.mark.slow
def test_unwritten_cache_is_never_read(engine: Engine, texts: list[list[int]]) -> None:
    """A step that was launched early may leave anything in blocks that others get."""
    stored = [*engine._cache.keys.values(), *engine._cache.values.values()]
    for values in stored:
        values.fill_(torch.nan)
    numbers = [start(engine, prompt) for prompt in PROMPTS]
    results = run(engine)
    for values in stored:
        values.zero_()
    assert [text(results, number) for number in numbers] == texts


@pytest.mark.parametrize("end", ["closed", pytest.param("stopped", marks=pytest.mark.slow)])
def test_nothing_is_left_of_a_step_that_nobody_wants(
    engine: Engine, texts: list[list[int]], end: str
) -> None:
    """All sequences of a step that was launched early are closed, or end with the token before."""
    stop_token_ids = (texts[0][2],) if end == "stopped" else ()
    number = start(engine, PROMPTS[0], stop_token_ids=stop_token_ids)
    results = [*engine.step(), *engine.step(), *engine.step()]
    assert text(results, number) == texts[0][:3]
    assert engine.has_work == (end == "closed")
    engine.close(engine.sequence(number))
    assert not engine.has_work
    assert engine._launched is None
    assert engine.load().free_blocks == engine.load().total_blocks
    assert alone(engine, PROMPTS[1]) == texts[1]
