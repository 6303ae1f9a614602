"""What a step of an engine costs on the simulated device in force."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import outrider
from outrider.decoding.draft import ROOT, Draft
from outrider.decoding.settings import Sampling
from outrider.engine.loop.engine import Engine
from outrider.engine.work import Decode, Decoded, Result
from tests.support.simulated_cuda.counts import Counts
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.tensor import SimulatedTensor

PROMPT_LENGTH = 9
WARM_UPS = 1  # rounds
MEASURED = 2
FIRST_TOKEN = 3
OURS = str(Path(outrider.__file__).parent)
KERNELS = str(Path(OURS) / "engine" / "kernels")  # a device runs them

T = TypeVar("T")


def counts_of_step(
    engine: Engine, sequences: int, tokens: int, sampling: Sampling, *, branches: bool = False
) -> Counts:
    """Returns counts of a step that verifies tokens of several sequences, after other such steps.

    It is the cheaper one of two: in the other a graph may have been captured.

    tokens: of each sequence: the last committed one, and drafted ones in a chain.
    branches: the drafted tokens are siblings instead.
    """
    cuda = SimulatedTensor.of
    assert isinstance(cuda, SimulatedCuda)

    def counted(step: Callable[[], None]) -> Counts:
        cuda.counts = Counts()
        step()
        return cuda.counts

    measured = _measured(engine, sequences, _draft(tokens - 1, branches=branches), sampling, counted)
    return min(measured, key=lambda counts: sum(counts.totals().values()))


def calls_of_step(engine: Engine, sequences: int, tokens: int, sampling: Sampling) -> Counter[str]:
    """Returns how often our own code calls a function in such a step, by the place of the call."""

    def counted(step: Callable[[], None]) -> Counter[str]:
        with _counting_calls() as calls:
            step()
        return calls

    measured = _measured(engine, sequences, _draft(tokens - 1, branches=False), sampling, counted)
    return min(measured, key=Counter.total)


@contextmanager
def _counting_calls() -> Iterator[Counter[str]]:
    """Counts calls, and how often a generator goes on, of functions and by functions of our own code."""
    calls = Counter[str]()

    def count(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event in ("call", "c_call") and file.startswith(OURS) and not file.startswith(KERNELS):
            calls[f"{file.removeprefix(OURS)} {frame.f_code.co_qualname}"] += 1

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def _measured(
    engine: Engine,
    sequences: int,
    draft: Draft,
    sampling: Sampling,
    measured: Callable[[Callable[[], None]], T],
) -> list[T]:
    """Returns what ``measured`` makes of each of some rounds of a step, after other such rounds."""
    opened = [engine.open(PROMPT_LENGTH, number, sampling) for number in range(sequences)]
    texts = {sequence.number: [FIRST_TOKEN + sequence.number % 50] * PROMPT_LENGTH for sequence in opened}
    for of_round in (Draft(), *[draft] * WARM_UPS):
        _verify(engine, texts, of_round, lambda step: step())
    found = []
    for _ in range(MEASURED):
        of_step, steps = _verify(engine, texts, draft, measured)
        assert steps == 1, "all take part in one step"
        found.append(of_step)
    for sequence in opened:
        engine.close(sequence)
    return found


def _draft(nodes: int, *, branches: bool) -> Draft:
    parents = [ROOT] * nodes if branches else range(ROOT, nodes - 1)
    return Draft(tuple(range(FIRST_TOKEN, FIRST_TOKEN + nodes)), tuple(parents))


def _verify(
    engine: Engine, texts: dict[int, list[int]], draft: Draft, measured: Callable[[Callable[[], None]], T]
) -> tuple[T, int]:
    """Makes a round of all texts, which go on as it says.

    Returns what ``measured`` makes of its first step, and the number of its steps.
    """
    for number, text in texts.items():
        base = len(engine.sequence(number).tokens)
        engine.submit(Decode(number, base, tuple(text[base:]), draft, len(text)))
    results = list[Result]()
    found, steps = measured(lambda: results.extend(engine.step())), 1
    while engine.has_work:
        results += engine.step()
        steps += 1
    for result in results:
        assert isinstance(result, Decoded)
        texts[result.sequence] += result.verdict.tokens
    return found, steps
