"""Costs of an engine's step on the active simulated device."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import outrider
from outrider.decoding.draft import ROOT, Draft
from outrider.decoding.settings import Sampling
from outrider.engine.loop.engine import Engine
from outrider.engine.work import NONE_ASKED, AskedAdapter, Decode, Decoded, Result
from tests.support.simulated_cuda.counts import Counts
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.tensor import SimulatedTensor

PROMPT_LENGTH = 9
WARM_UPS = 1  # rounds
MEASURED = 2
FIRST_TOKEN = 3
OURS = str(Path(outrider.__file__).parent)
KERNELS = str(Path(OURS) / "engine" / "kernels")  # code of kernels, which runs on the device

T = TypeVar("T")


def counts_of_step(
    engine: Engine,
    sequences: int,
    tokens: int,
    sampling: Sampling,
    *,
    branches: bool = False,
    adapters: Sequence[AskedAdapter] = (),
) -> Counts:
    """Returns the counts of a step that verifies several sequences, after a warm-up.

    Two steps are measured and the cheaper step counts, because the other step may capture a graph.

    tokens: tokens per sequence: the last committed token, and a chain of drafted tokens.
    branches: the drafted tokens are siblings instead of a chain.
    adapters: adapter of each sequence; empty: no sequence has one.
    """
    cuda = SimulatedTensor.of
    assert isinstance(cuda, SimulatedCuda)

    def counted(step: Callable[[], None]) -> Counts:
        cuda.counts = Counts()
        step()
        return cuda.counts

    draft = _draft(tokens - 1, branches=branches)
    measured = _measured(engine, adapters or [NONE_ASKED] * sequences, draft, sampling, counted)
    return min(measured, key=lambda counts: sum(counts.totals().values()))


def calls_of_step(engine: Engine, sequences: int, tokens: int, sampling: Sampling) -> Counter[str]:
    """Returns the number of function calls of our code in a verifying step, by function."""

    def counted(step: Callable[[], None]) -> Counter[str]:
        with _counting_calls() as calls:
            step()
        return calls

    draft = _draft(tokens - 1, branches=False)
    measured = _measured(engine, [NONE_ASKED] * sequences, draft, sampling, counted)
    return min(measured, key=Counter.total)


@contextmanager
def _counting_calls() -> Iterator[Counter[str]]:
    """Counts calls of and by functions of our code. Each resumption of a generator is a call."""
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
    adapters: Sequence[AskedAdapter],
    draft: Draft,
    sampling: Sampling,
    measured: Callable[[Callable[[], None]], T],
) -> list[T]:
    """Returns the result of ``measured`` for each of MEASURED rounds, after a warm-up."""
    opened = [
        engine.open(PROMPT_LENGTH, number, sampling, adapter=adapter)
        for number, adapter in enumerate(adapters)
    ]
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
    """Runs a round of all texts and appends its tokens to the texts.

    Returns the result of ``measured`` for the first step, and the number of steps.
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
