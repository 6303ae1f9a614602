"""Who takes part in a step, and what happens when the cache runs short."""

import random

import pytest

from decoding.draft import Draft
from decoding.settings import Sampling
from engine.engine import Engine
from engine.errors import CacheTooSmallError
from engine.sequence import Sequence
from engine.settings import EngineSettings
from engine.work import Generate, Generated, Verified, Verify
from tests.engine.checkpoints import VOCAB_SIZE, write_checkpoint

BLOCK = 8
COUNT = 24
GREEDY = Sampling(temperature=0, max_tokens=COUNT)
BYTES_PER_BLOCK = BLOCK * 3 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, kv heads, dimension, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("llama"), "llama"))


def engine_with(folder: str, blocks: int = 200, chunk: int = 512) -> Engine:
    settings = EngineSettings(
        model=folder, block_size=BLOCK, cache_memory=blocks * BYTES_PER_BLOCK, prefill_chunk=chunk
    )
    return Engine(settings)


def prompts(count: int, length: int) -> list[tuple[int, ...]]:
    rng = random.Random(length)
    return [tuple(rng.choices(range(3, VOCAB_SIZE), k=length)) for _ in range(count)]


def start(engine: Engine, prompt: tuple[int, ...]) -> Sequence:
    sequence = engine.open(len(prompt), 0, GREEDY)
    engine.submit(Generate(sequence, 0, prompt, COUNT))
    return sequence


def run(engine: Engine) -> dict[int, list[int]]:
    """Every token by the number of its sequence."""
    tokens: dict[int, list[int]] = {}
    while engine.has_work:
        for result in engine.step():
            assert isinstance(result, Generated)
            tokens.setdefault(result.sequence.number, []).append(result.token)
    return tokens


def test_a_short_cache_preempts_and_computes_again_without_changing_a_token(folder: str) -> None:
    asked = prompts(6, 20)
    roomy = engine_with(folder)
    expected = []
    for prompt in asked:
        alone = start(roomy, prompt)
        expected.append(run(roomy)[alone.number])
    tight = engine_with(folder, blocks=12)  # two sequences of 44 tokens fit, six do not
    sequences = [start(tight, prompt) for prompt in asked]
    held, most_waiting = 0, 0
    answers: dict[int, list[int]] = {sequence.number: [] for sequence in sequences}
    while tight.has_work:
        for result in tight.step():
            assert isinstance(result, Generated)
            answers[result.sequence.number].append(result.token)
            if result.finish is not None:
                tight.close(result.sequence)
        held = max(held, tight.load().running)
        most_waiting = max(most_waiting, tight.load().waiting)
    assert [answers[sequence.number] for sequence in sequences] == expected
    assert most_waiting > 0
    assert held < len(asked)


def test_the_oldest_sequence_is_never_preempted(folder: str) -> None:
    engine = engine_with(folder, blocks=12)
    oldest, *_ = [start(engine, prompt) for prompt in prompts(6, 20)]
    steps = 0
    while True:
        steps += 1
        if any(result.sequence is oldest and result.finish is not None for result in engine.step()):
            break
    assert steps == COUNT  # its prompt fits into one chunk, and it took part in every step


def test_a_long_prefill_holds_running_sequences_up_for_no_more_than_a_chunk(folder: str) -> None:
    engine = engine_with(folder, chunk=16)
    running = start(engine, prompts(1, 10)[0])
    engine.step()
    start(engine, prompts(1, 120)[0])
    for _ in range(120 // 16):
        assert [result.sequence for result in engine.step()] == [running]
        assert engine.last_step is not None
        assert engine.last_step.tokens <= 16 + 1


def test_two_long_prefills_share_the_chunk(folder: str) -> None:
    engine = engine_with(folder, chunk=16)
    for prompt in prompts(2, 100):
        start(engine, prompt)
    engine.step()
    assert engine.last_step is not None
    assert engine.last_step.tokens == 16


def test_topping_up_sends_no_token_twice(folder: str) -> None:
    prompt = prompts(1, 12)[0]
    engine = engine_with(folder)
    sequence = engine.open(len(prompt), 0, GREEDY)
    engine.submit(Generate(sequence, 0, prompt, 4))
    got: list[int] = []
    while engine.has_work:
        got += [result.token for result in engine.step() if isinstance(result, Generated)]
        if len(got) == 2:
            engine.submit(Generate(sequence, len(prompt), tuple(got), 10))
    other = engine_with(folder)
    whole = start(other, prompt)
    expected = run(other)[whole.number]
    assert got == expected[:12]


def test_new_work_voids_the_old(folder: str) -> None:
    engine = engine_with(folder)
    prompt = prompts(1, 12)[0]
    sequence = start(engine, prompt)
    tokens = [result.token for _ in range(6) for result in engine.step() if isinstance(result, Generated)]
    engine.submit(Verify(sequence, len(prompt), tuple(tokens[:2]), Draft.chain(tokens[2:5]), 7))
    results = []
    while engine.has_work:
        results += engine.step()
    assert [type(result) for result in results] == [Verified]
    assert results[0].round == 7
    assert results[0].verdict.accepted == (0, 1, 2)


def test_a_sequence_that_can_never_fit_is_refused(folder: str) -> None:
    engine = engine_with(folder, blocks=4)
    sequence = engine.open(20, 0, GREEDY)
    with pytest.raises(CacheTooSmallError, match="44 tokens"):
        engine.submit(Generate(sequence, 0, prompts(1, 20)[0], COUNT))
