"""Who takes part in a step, and what happens when the cache runs short."""

import random
from collections.abc import Mapping

import pytest

from outrider.decoding.draft import Draft
from outrider.decoding.settings import Sampling
from outrider.engine.errors import CacheTooSmallError
from outrider.engine.loop.engine import Engine
from outrider.engine.scheduling.scheduler import SPARE_SHARE, Scheduler
from outrider.engine.sequence import EngineSequence
from outrider.engine.settings import EngineSettings
from outrider.engine.tasks.task import Task
from outrider.engine.work import Decode, Decoded, PreparedTree, Propose, Proposed, Result, plain_decoding
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint

BLOCK = 8
COUNT = 24
GREEDY = Sampling(temperature=0, max_tokens=COUNT)
BYTES_PER_BLOCK = BLOCK * 3 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, kv heads, dimension, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("llama"), "llama"))


def engine_with(folder: str, blocks: int = 200, chunk: int = 512, branches: int = 0) -> Engine:
    settings = EngineSettings(
        model=folder,
        block_size=BLOCK,
        cache_memory=blocks * BYTES_PER_BLOCK,
        prefill_chunk=chunk,
        draft_ahead=branches,
    )
    return Engine.from_settings(settings)


def prompts(count: int, length: int) -> list[tuple[int, ...]]:
    rng = random.Random(length)
    return [tuple(rng.choices(range(3, VOCAB_SIZE), k=length)) for _ in range(count)]


def start(engine: Engine, prompt: tuple[int, ...]) -> EngineSequence:
    sequence = engine.open(len(prompt), 0, GREEDY)
    engine.submit(plain_decoding(sequence.number, 0, prompt, COUNT))
    return sequence


def step(engine: Engine) -> list[Decoded]:
    """One in which tokens are generated, and nothing else."""
    results = engine.step()
    generated = [result for result in results if isinstance(result, Decoded)]
    assert generated == results
    return generated


def run(engine: Engine) -> dict[int, list[int]]:
    """Every token by the number of its sequence."""
    tokens: dict[int, list[int]] = {}
    while engine.has_work:
        for result in step(engine):
            tokens.setdefault(result.sequence, []).append(result.verdict.tokens[-1])
    return tokens


def test_short_cache_preempts_and_recomputes_without_changing_a_token(folder: str) -> None:
    asked = prompts(6, 20)
    roomy = engine_with(folder)
    expected = []
    for prompt in asked:
        alone = start(roomy, prompt)
        expected.append(run(roomy)[alone.number])
    tight = engine_with(folder, blocks=12)  # two sequences of 44 tokens fit, six do not
    sequences = [start(tight, prompt) for prompt in asked]
    by_number = {sequence.number: sequence for sequence in sequences}
    held, most_waiting = 0, 0
    answers: dict[int, list[int]] = {sequence.number: [] for sequence in sequences}
    while tight.has_work:
        for result in step(tight):
            answers[result.sequence].append(result.verdict.tokens[-1])
            if result.finish is not None:
                tight.close(by_number[result.sequence])
        held = max(held, tight.load().running)
        most_waiting = max(most_waiting, tight.load().waiting)
    assert [answers[sequence.number] for sequence in sequences] == expected
    assert most_waiting > 0
    assert held < len(asked)


def test_oldest_sequence_is_never_preempted(folder: str) -> None:
    engine = engine_with(folder, blocks=12)
    oldest, *_ = [start(engine, prompt) for prompt in prompts(6, 20)]
    steps = 0
    while True:
        steps += 1
        if any(result.sequence == oldest.number and result.finish is not None for result in step(engine)):
            break
    assert steps == COUNT  # its prompt fits into one chunk, and it took part in every step


def test_each_preemption_is_told_once_to_whom_it_befell(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lost_cache: list[EngineSequence] = []
    preempt = Scheduler._preempt

    def noted(scheduler: Scheduler, sequence: EngineSequence, tasks: Mapping[int, Task]) -> None:
        lost_cache.extend([sequence] if sequence.blocks else [])
        preempt(scheduler, sequence, tasks)

    monkeypatch.setattr(Scheduler, "_preempt", noted)
    engine = engine_with(folder, blocks=12)
    sequences = [start(engine, prompt) for prompt in prompts(6, 20)]
    by_number = {sequence.number: sequence for sequence in sequences}
    told = dict.fromkeys(sequences, 0)
    while engine.has_work:
        for result in step(engine):
            told[by_number[result.sequence]] += result.timings.preemptions
            if result.finish is not None:
                engine.close(by_number[result.sequence])
    assert told == {sequence: lost_cache.count(sequence) for sequence in sequences}
    assert told[sequences[0]] == 0
    assert lost_cache


def test_long_prefill_delays_running_sequences_by_at_most_a_chunk(folder: str) -> None:
    engine = engine_with(folder, chunk=16)
    running = start(engine, prompts(1, 10)[0])
    engine.step()
    start(engine, prompts(1, 120)[0])
    for _ in range(120 // 16):
        assert [result.sequence for result in engine.step()] == [running.number]
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
    engine.submit(plain_decoding(sequence.number, 0, prompt, 4))
    got: list[int] = []
    while engine.has_work:
        got += [result.verdict.tokens[-1] for result in engine.step() if isinstance(result, Decoded)]
        if len(got) == 2:
            engine.submit(plain_decoding(sequence.number, len(prompt), tuple(got), 10))
    other = engine_with(folder)
    whole = start(other, prompt)
    expected = run(other)[whole.number]
    assert got == expected[:12]


def test_new_work_voids_the_old(folder: str) -> None:
    engine = engine_with(folder)
    prompt = prompts(1, 12)[0]
    sequence = start(engine, prompt)
    tokens = [
        result.verdict.tokens[-1] for _ in range(6) for result in engine.step() if isinstance(result, Decoded)
    ]
    engine.submit(Decode(sequence.number, len(prompt), tuple(tokens), Draft(), 7))
    (result,) = idle(engine)
    assert isinstance(result, Decoded)
    assert result.round == 7
    assert len(sequence.tokens) == len(prompt) + 7


def test_sequence_that_can_never_fit_is_refused(folder: str) -> None:
    engine = engine_with(folder, blocks=4)
    sequence = engine.open(20, 0, GREEDY)
    with pytest.raises(CacheTooSmallError, match="44 tokens"):
        engine.submit(plain_decoding(sequence.number, 0, prompts(1, 20)[0], COUNT))


DEPTH = 4
BRANCHES = 12


def drafted(engine: Engine, asked: list[tuple[int, ...]]) -> dict[EngineSequence, Draft]:
    """Sequences with their Drafts, in which nothing is prepared yet."""
    drafts: dict[EngineSequence, Draft] = {}
    for prompt in asked:
        engine.submit(Propose(engine.open(len(prompt), 0, GREEDY).number, 0, prompt, DEPTH, 0))
    while len(drafts) < len(asked):
        results = [result for result in engine.step() if isinstance(result, Proposed)]
        drafts |= {engine.sequence(result.sequence): result.draft for result in results}
    return drafts


def idle(engine: Engine) -> list[Result]:
    results: list[Result] = []
    while engine.has_work:
        results += engine.step()
    return results


def test_idle_work_leaves_a_share_of_the_cache_free(folder: str) -> None:
    engine = engine_with(folder, blocks=20, branches=BRANCHES)
    drafts = drafted(engine, prompts(4, 20))
    free = engine.load().free_blocks
    spare = SPARE_SHARE * engine.load().total_blocks
    least = free
    while engine.has_work:
        engine.step()
        least = min(least, engine.load().free_blocks)
    assert least == spare  # it takes what it may
    assert all(sequence.cached == 20 for sequence in drafts)


def test_there_is_no_idle_step_that_would_leave_less(folder: str) -> None:
    engine = engine_with(folder, blocks=20, branches=BRANCHES)
    long = prompts(1, 100)[0]
    engine.submit(Decode(engine.open(len(long), 0, GREEDY).number, 0, long, Draft(), 1))
    engine.step()
    drafts = drafted(engine, prompts(2, 21))  # which fill their blocks
    before = engine.last_step, engine.load().free_blocks
    assert before[1] == 20 - 13 - 2 * 3
    assert engine.has_work
    assert engine.step() == []
    assert not engine.has_work
    assert (engine.last_step, engine.load().free_blocks) == before
    assert all(len(sequence.pending) == DEPTH - 1 for sequence in drafts)


def test_prepared_cache_is_freed_before_a_sequence_is_preempted(folder: str) -> None:
    engine = engine_with(folder, blocks=20, branches=BRANCHES)
    asked, *others_asked = prompts(3, 20)
    ((waiting, draft),) = drafted(engine, [asked]).items()
    assert any(isinstance(result, PreparedTree) for result in idle(engine))
    assert len(waiting.blocks) > 20 - 2 * 6  # too many for two more sequences of 44 tokens
    others = [start(engine, prompt) for prompt in others_asked]
    for _ in range(COUNT):
        assert [result.sequence for result in engine.step()] == [sequence.number for sequence in others]
    assert not engine.has_work
    assert (waiting.cached, len(waiting.blocks)) == (20, 3)
    engine.submit(Propose(waiting.number, 20, (*draft.tokens, 5), DEPTH, 1))
    engine.step(is_interrupted=lambda: True)
    assert engine.last_step is not None
    assert engine.last_step.tokens == DEPTH + 1  # none of the prompt
    (again,) = [result for result in idle(engine) if isinstance(result, Proposed)]
    fresh = engine_with(folder)
    assert list(drafted(fresh, [(*asked, *draft.tokens, 5)]).values()) == [again.draft]


def test_verdict_whose_branches_lost_their_cache_was_not_foreseen(folder: str) -> None:
    engine = engine_with(folder, blocks=20, branches=BRANCHES)
    asked, *others_asked = prompts(3, 20)
    ((waiting, draft),) = drafted(engine, [asked]).items()
    idle(engine)
    for prompt in others_asked:
        start(engine, prompt)
    run(engine)
    assert len(waiting.pending) == 0
    engine.submit(Propose(waiting.number, 20, (*draft.tokens[:1], draft.tokens[1] ^ 1), DEPTH, 1))
    (proposed,) = [result for result in idle(engine) if isinstance(result, Proposed)]
    if proposed.ahead is not None:
        assert proposed.ahead.tokens == 0
        assert proposed.ahead.wasted >= 0
