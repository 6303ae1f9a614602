"""Greedy tokens equal those of transformers' own generate, for every family of models."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from outrider.decoding.draft import ROOT, Draft
from outrider.decoding.settings import Sampling
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Decode, Decoded, plain_decoding
from tests.support.checkpoints import (
    ARCHITECTURES,
    VOCAB_SIZE,
    Reference,
    differences,
    reference,
    write_checkpoint,
)

COUNT = 24
LENGTHS = (5, 40, 70)
GREEDY = Sampling(temperature=0, max_tokens=COUNT)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    return Engine.from_settings(
        EngineSettings(model=str(checkpoint), block_size=8, cache_memory=2**24, prefill_chunk=16)
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def references(checkpoint: Path, prompts: list[list[int]]) -> list[Reference]:
    return reference(checkpoint, prompts, COUNT)


@pytest.mark.slow_beyond_first
def test_plain_decoding_in_a_ragged_batch_with_staggered_arrivals(
    engine: Engine, prompts: list[list[int]], references: list[Reference]
) -> None:
    answers: dict[int, list[int]] = {}
    sequences = []
    for prompt in prompts:  # each prompt is fed in chunks while the ones before it decode
        sequence = engine.open(len(prompt), 0, GREEDY)
        engine.submit(plain_decoding(sequence.number, 0, tuple(prompt), COUNT))
        answers[sequence.number] = []
        sequences.append(sequence)
        _collect(engine, answers, steps=2)
    _collect(engine, answers, steps=1000)
    for sequence in sequences:
        engine.close(sequence)
    assert not differences(references, list(answers.values()))


def _collect(engine: Engine, answers: dict[int, list[int]], steps: int) -> None:
    while engine.has_work and steps:
        steps -= 1
        for result in engine.step():
            assert isinstance(result, Decoded)
            answers[result.sequence].append(result.verdict.tokens[-1])


@pytest.mark.parametrize("width", [1, 3])
def test_verification_with_refusals_in_one_batch_with_prefills(
    engine: Engine, prompts: list[list[int]], references: list[Reference], width: int
) -> None:
    rng = random.Random(2)
    answers: list[list[int]] = [[] for _ in prompts]
    sequences = [engine.open(len(prompt), 0, GREEDY) for prompt in prompts]
    finished = 0
    for index, prompt in enumerate(prompts):
        draft = _draft(references[index].tokens, rng, width)
        engine.submit(Decode(sequences[index].number, 0, tuple(prompt), draft, 0))
    while finished < len(prompts):
        for result in engine.step():
            assert isinstance(result, Decoded)
            index = [sequence.number for sequence in sequences].index(result.sequence)
            answers[index] += result.verdict.tokens
            if result.finish:
                finished += 1
                continue
            draft = _draft(references[index].tokens[len(answers[index]) :], rng, width)
            length = len(sequences[index].tokens)
            engine.submit(Decode(result.sequence, length, (), draft, round=length))
    for sequence in sequences:
        engine.close(sequence)
    assert not differences(references, answers)


def _draft(coming: Sequence[int], rng: random.Random, width: int) -> Draft:
    """Up to four levels of ``width`` branches, one of which is right more often than not."""
    tokens: list[int] = []
    parents: list[int] = []
    level = [ROOT]
    for token in coming[: rng.randrange(4)]:
        right = token if rng.random() < 0.7 else rng.randrange(3, VOCAB_SIZE)
        wrong = [other for other in rng.sample(range(3, VOCAB_SIZE), width) if other != right][: width - 1]
        siblings = rng.sample([right, *wrong], len(wrong) + 1)
        parent = rng.choice(level) if width > 1 and rng.random() < 0.2 else level[-1]
        tokens += siblings
        parents += [parent] * len(siblings)
        level = [len(tokens) - len(siblings) + siblings.index(right)]
    return Draft(tuple(tokens), tuple(parents))
