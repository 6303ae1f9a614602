"""What a step of an engine costs on the simulated device in force."""

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
    opened = [engine.open(PROMPT_LENGTH, number, sampling) for number in range(sequences)]
    texts = {sequence.number: [FIRST_TOKEN + sequence.number] * PROMPT_LENGTH for sequence in opened}
    _verify(engine, texts, Draft())
    draft = _draft(tokens - 1, branches=branches)
    for _ in range(WARM_UPS):
        _verify(engine, texts, draft)
    measured = []
    for _ in range(MEASURED):
        cuda.counts = Counts()
        steps = _verify(engine, texts, draft)
        assert steps == 1, "all take part in one step"
        measured.append(cuda.counts)
    for sequence in opened:
        engine.close(sequence)
    return min(measured, key=lambda counts: sum(counts.totals().values()))


def _draft(nodes: int, *, branches: bool) -> Draft:
    parents = [ROOT] * nodes if branches else range(ROOT, nodes - 1)
    return Draft(tuple(range(FIRST_TOKEN, FIRST_TOKEN + nodes)), tuple(parents))


def _verify(engine: Engine, texts: dict[int, list[int]], draft: Draft) -> int:
    """A round of all texts, which go on as it says. Returns how many steps it took."""
    for number, text in texts.items():
        base = len(engine.sequence(number).tokens)
        engine.submit(Decode(number, base, tuple(text[base:]), draft, len(text)))
    steps, results = 0, list[Result]()
    while engine.has_work:
        steps += 1
        results += engine.step()
    for result in results:
        assert isinstance(result, Decoded)
        texts[result.sequence] += result.verdict.tokens
    return steps
