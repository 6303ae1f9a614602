"""Requests to a model with recurrent states, answered in rounds with rejections, losses and preemptions."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from outrider.decoding.draft import ROOT, Draft
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.engine.loop.engine import Engine
from outrider.engine.sequence import EngineSequence
from outrider.engine.work import Decode, Decoded, plain_decoding
from tests.support.checkpoints import VOCAB_SIZE

TOKENS = 16  # tokens of an answer


@dataclass(frozen=True)
class Asked:
    """Request whose seed is in its sampling settings."""

    prompt: tuple[int, ...]
    sampling: Sampling
    noise_key: int


def requests(count: int, seed: int = 0) -> list[Asked]:
    """Returns requests with prompts of many lengths, some with a common prefix."""
    rng, made = Random(seed), list[Asked]()
    common = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
    for number in range(count):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice([1, 3, 17, 30]))]
        prompt = (*common[: rng.choice([0, 0, 16, 40])], *own)
        sampling = Sampling(temperature=0.9, max_tokens=TOKENS, seed=number)
        made.append(Asked(prompt, sampling, noise_key(number, 0, prompt)))
    return made


def plain(engine: Engine, asked: Asked) -> tuple[int, ...]:
    """Returns the answer to a request alone, by plain decoding."""
    sequence = engine.open(len(asked.prompt), asked.noise_key, asked.sampling)
    engine.submit(plain_decoding(sequence.number, 0, asked.prompt, TOKENS))
    text: tuple[int, ...] = ()
    while engine.has_work:
        text += tuple(token for result in engine.step() for token in _decoded(result).verdict.tokens)
    engine.close(sequence)
    return text


def chain(rest: Sequence[int], correct: int, wrong: int) -> Draft:
    """Returns a chain whose first tokens are correct. rest: the following text."""
    refused = [(token + 1) % VOCAB_SIZE for token in rest[correct : correct + wrong]]
    return Draft.chain([*rest[:correct], *refused])


def tree(rest: Sequence[int], correct: int) -> Draft:
    """Returns a tree with wrong nodes before the correct node on every level, and a wrong end."""
    tokens, parents, last = list[int](), list[int](), ROOT
    for token in rest[:correct]:
        place = len(tokens)
        tokens += [(token + 1) % VOCAB_SIZE, (token + 2) % VOCAB_SIZE, token]
        parents += [last, place, last]
        last = place + 2
    tokens.append((rest[correct] + 1) % VOCAB_SIZE if correct < len(rest) else 0)
    return Draft(tuple(tokens), (*parents, last))


@dataclass
class _Run:
    asked: Asked
    expected: tuple[int, ...]
    sequence: EngineSequence | None = None
    text: tuple[int, ...] = ()
    round: int = 0
    is_finished: bool = False


def in_rounds(
    engine: Engine, asked: Sequence[Asked], expected: Sequence[tuple[int, ...]], seed: int
) -> tuple[list[tuple[int, ...]], int]:
    """Answers requests in one batch with random Drafts, plain decoding and losses.

    A lost sequence is opened again from its tokens alone, as after the loss of a worker.

    Returns:
        Texts, and the number of preemptions.
    """
    rng, preemptions = Random(seed), 0
    runs = [_Run(*pair) for pair in zip(asked, expected, strict=True)]
    while left := [run for run in runs if not run.is_finished]:
        of_sequence: dict[int, _Run] = {}
        for run in left:
            if run.sequence is not None and rng.random() < 0.1:
                engine.close(run.sequence)
                run.sequence = None
            if run.sequence is None:
                run.sequence = engine.open(len(run.asked.prompt), run.asked.noise_key, run.asked.sampling)
            engine.submit(_work(run, rng))
            of_sequence[run.sequence.number] = run
        while engine.has_work:
            for result in engine.step():
                decoded = _decoded(result)
                run = of_sequence[decoded.sequence]
                run.text += decoded.verdict.tokens
                run.is_finished |= decoded.finish is not None
                preemptions += decoded.timings.preemptions
    for run in runs:
        assert run.sequence is not None
        engine.close(run.sequence)
    return [run.text for run in runs], preemptions


def _work(run: _Run, rng: Random) -> Decode:
    assert run.sequence is not None
    base = len(run.sequence.tokens)
    tokens = (*run.asked.prompt, *run.text)[base:]
    run.round += 1
    if rng.random() < 0.3:
        return plain_decoding(run.sequence.number, base, tokens, rng.randrange(1, 4), run.round)
    rest, correct = run.expected[len(run.text) :], rng.randrange(5)
    draft = tree(rest, correct) if rng.random() < 0.5 else chain(rest, correct, rng.randrange(4))
    return Decode(run.sequence.number, base, tokens, draft, run.round)


def _decoded(result: object) -> Decoded:
    assert isinstance(result, Decoded), result
    return result
