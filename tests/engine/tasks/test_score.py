"""Log-probabilities of a prompt's own tokens."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from outrider.decoding.sampling import scores
from outrider.decoding.settings import Sampling
from outrider.engine.forward.linear import PackedLinear
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Decoded, Failed, Score, Scored, plain_decoding
from outrider.pace.settings import MAX_DEPTH
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.model import model_of

BLOCK, CHUNK = 4, 16
PROMPT = tuple(random.Random(5).choices(range(3, VOCAB_SIZE), k=75))
GREEDY = Sampling(temperature=0, max_tokens=8, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def engine_of(folder: Path, **settings) -> Engine:
    asked = {"cache_memory": 2**22, "prefill_chunk": CHUNK, **settings}
    return Engine.from_settings(EngineSettings(model=str(folder), block_size=BLOCK, **asked))


def expected(engine: Engine, prompt: tuple[int, ...] = PROMPT) -> torch.Tensor:
    """[num_tokens, vocab_size] after each token, by one pass over all of them."""
    with torch.inference_mode():
        sequence = engine.open(len(prompt), 0, GREEDY)
        engine.close(sequence)
        model = type(model_of(engine)).from_pretrained(engine.settings.model, dtype=torch.float32)
        return model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)


def submitted(engine: Engine, start: int = 1, prompt: tuple[int, ...] = PROMPT) -> int:
    sequence = engine.open(len(prompt), 0, GREEDY)
    engine.submit(Score(sequence.number, 0, prompt, start))
    return sequence.number


def run(engine: Engine) -> list:
    results = []
    while engine.has_work:
        results += engine.step()
    return results


def of(number: int, results: list) -> list:
    """All that was told of that sequence, in order and without a gap."""
    parts = [part for part in results if isinstance(part, Scored) and part.sequence == number]
    for before, after in pairwise(parts):
        assert after.start == before.start + len(before.logprobs)
    return [told for part in parts for told in part.logprobs]


def check(told: list, values: torch.Tensor, start: int = 1, prompt: tuple[int, ...] = PROMPT) -> None:
    assert len(told) == len(prompt) - start
    for position, score in enumerate(told, start=start):
        row = values[position - 1]
        assert score.chosen == pytest.approx(row[prompt[position]].item(), abs=1e-4)
        assert [token for token, _ in score.top] == row.topk(2).indices.tolist()
        assert score.top[0][1] == pytest.approx(row.max().item(), abs=1e-4)


def test_prompt_logprobs_do_not_depend_on_chunking(folder: Path) -> None:
    engine = engine_of(folder)
    number = submitted(engine)
    results = run(engine)
    assert len(results) == -(-(len(PROMPT) - 1) // CHUNK)
    check(of(number, results), expected(engine))


@pytest.mark.parametrize("start", [2, 17, 40, len(PROMPT) - 1])
def test_prompt_logprobs_from_a_position_skip_the_tokens_before_it(folder: Path, start: int) -> None:
    engine = engine_of(folder)
    number = submitted(engine, start)
    check(of(number, run(engine)), expected(engine), start)


def test_cached_prefix_is_scored_and_stays_shared(folder: Path) -> None:
    engine = engine_of(folder)
    values, first = expected(engine), submitted(engine)
    check(of(first, run(engine)), values)
    second = submitted(engine)
    check(of(second, run(engine)), values)
    other = engine.open(len(PROMPT), 0, GREEDY)
    engine.submit(plain_decoding(other.number, 0, PROMPT, 1))
    engine.step()
    assert engine.last_step is not None
    assert engine.last_step.tokens <= BLOCK, "the rest was shared"


def test_beside_sequences_that_decode_nobody_s_numbers_change(folder: Path) -> None:
    def told(engine: Engine, scored: bool) -> list:
        streams = [engine.open(5, number, Sampling(max_tokens=12, seed=number)) for number in range(3)]
        for stream in streams:
            engine.submit(plain_decoding(stream.number, 0, PROMPT[:5], 12))
        if scored:
            number = submitted(engine)
        results = run(engine)
        if scored:
            check(of(number, results), expected(engine))
        return [
            (result.sequence, result.verdict.tokens[-1]) for result in results if isinstance(result, Decoded)
        ]

    alone = sorted(told(engine_of(folder), scored=False))
    assert sorted(told(engine_of(folder), scored=True)) == alone


def test_generation_continues_after_prompt_logprobs(folder: Path) -> None:
    engine = engine_of(folder)
    number = submitted(engine)
    run(engine)
    engine.submit(plain_decoding(number, len(PROMPT), (), 8))
    went_on = [result.verdict.tokens[-1] for result in run(engine)]
    other = engine_of(folder)
    alone = other.open(len(PROMPT), 0, GREEDY)
    other.submit(plain_decoding(alone.number, 0, PROMPT, 8))
    assert went_on == [result.verdict.tokens[-1] for result in run(other)]


def test_preempted_sequence_reports_no_prompt_logprob_twice(folder: Path) -> None:
    engine = engine_of(folder)
    number = submitted(engine)
    results = engine.step() + engine.step()
    engine._scheduler._preempt(engine.sequence(number), engine._queue.tasks)
    check(of(number, results + run(engine)), expected(engine))


def test_step_has_no_more_rows_than_the_memory_plan_counts(folder: Path) -> None:
    engine = engine_of(folder, prefill_chunk=64, max_sequences=3)
    numbers = [submitted(engine), submitted(engine)]
    streams = [engine.open(1, 0, Sampling(max_tokens=30)) for _ in range(2)]
    for stream in streams:
        engine.submit(plain_decoding(stream.number, 0, PROMPT[:1], 30))
    most, results = 0, []
    while engine.has_work:
        step = engine.step()
        most = max(most, sum(len(result.logprobs) for result in step if isinstance(result, Scored)))
        results += step
    assert 0 < most <= (3 - 2) * (1 + MAX_DEPTH)
    for number in numbers:
        check(of(number, results), expected(engine))


@pytest.mark.parametrize("start", [0, len(PROMPT)])
def test_first_position_is_refused(folder: Path, start: int) -> None:
    with pytest.raises(ValueError, match=f"start={start} must be 1 to {len(PROMPT) - 1}"):
        submitted(engine_of(folder), start)


def test_rows_are_scored_alike_however_many_there_are() -> None:
    logits = torch.randn(200, 33, generator=torch.Generator().manual_seed(1))
    tokens = [row % 33 for row in range(200)]
    together = scores(logits, tokens, 3)
    assert together == tuple(scores(logits[row : row + 1], [tokens[row]], 3)[0] for row in range(200))
    assert [score.top for score in scores(logits[:2], tokens[:2], 0)] == [(), ()]


def test_log_probabilities_that_are_no_numbers_are_not_told(folder: Path) -> None:
    engine = engine_of(folder)
    head = model_of(engine).lm_head
    kept = vars(head.multiply) if isinstance(head, PackedLinear) else {"weight": head.weight.detach()}
    for weight in kept.values():
        if isinstance(weight, torch.Tensor):
            weight.fill_(torch.nan)
    number = submitted(engine)
    (failed,) = run(engine)
    assert isinstance(failed, Failed)
    assert failed.sequence == number
    assert "finite" in failed.reason
