"""What goes wrong in a step costs the sequence that caused it: the others go on with the same text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decoding.draft import Draft, SparseProbs
from outrider.decoding.grammar import GrammarError
from outrider.decoding.settings import Sampling
from outrider.engine.blame import NO_MEMORY
from outrider.engine.errors import CacheLostError
from outrider.engine.forward import graphs
from outrider.engine.forward.batch import Batch
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from outrider.engine.tasks.decode import DecodeTask
from outrider.engine.work import Decode, Decoded, Failed, Propose, Proposed, Score, Scored, plain_decoding
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_runs import run, texts
from tests.support.gpu import gpu
from tests.support.model import before_passes, model_of
from tests.support.poison import BLOCK, COUNT, POISON, POISONED, PROMPTS, SAMPLING, start, text_alone


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def engine(folder: Path) -> Engine:
    """An engine on a CPU: the harm is done by Python code, which the graphs of a GPU leave out."""
    return Engine.from_settings(
        EngineSettings(model=str(folder), device="cpu", block_size=BLOCK, cache_memory=2**20)
    )


def raising(error: Callable[[], BaseException], engine: Engine) -> None:
    """Has every forward pass raise that feeds the poison."""

    def harmed(batch: Batch) -> None:
        if (batch.token_ids == POISON).any():
            raise error()

    before_passes(engine, harmed)


def not_finite(engine: Engine, value: float = torch.nan) -> None:
    """Has the poison's embedding be no finite number."""
    with torch.no_grad():
        model_of(engine).get_input_embeddings().weight[POISON] = value


def stored(engine: Engine) -> list[torch.Tensor]:
    return [*engine._cache.keys.values(), *engine._cache.values.values()]


HARMS: dict[str, Callable[[Engine], None]] = {
    "raises": lambda engine: raising(lambda: IndexError("tokens 216, 217"), engine),
    "NaN": not_finite,
    "infinite": lambda engine: not_finite(engine, torch.inf),
}


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("harm", HARMS)
def test_only_the_sequence_that_harms_fails(engine: Engine, harm: str, place: int) -> None:
    expected = [text_alone(engine, prompt) for prompt in PROMPTS]
    HARMS[harm](engine)
    prompts = [*PROMPTS[:place], POISONED, *PROMPTS[place:]]
    sequences = [start(engine, prompt) for prompt in prompts]
    results = run(engine)
    (failed,) = (result for result in results if isinstance(result, Failed))
    assert failed.sequence == sequences.pop(place).number
    assert not any(number in failed.reason for number in ("216", "217"))  # nothing of the prompt
    assert texts(results, sequences) == expected
    for sequence in sequences:
        engine.close(sequence)
    assert engine.load().free_blocks == engine.load().total_blocks


def test_cache_that_is_not_finite_is_wiped_and_never_shared(engine: Engine) -> None:
    """Nobody who gets its blocks, or asks the same again, reads it."""
    expected = text_alone(engine, PROMPTS[0])
    not_finite(engine, torch.inf)
    harming = start(engine, POISONED)
    (failed,) = run(engine)
    assert isinstance(failed, Failed)
    assert not any(engine._cache.pool.find(digest) for digest in harming.hashes)
    sequences = [start(engine, PROMPTS[0]), start(engine, PROMPTS[1] * 4)]
    assert texts(run(engine), sequences)[0] == expected
    assert all(tensor.isfinite().all() for tensor in stored(engine))


@pytest.mark.parametrize("harmed", [0, 1])
def test_padding_reads_nothing_of_another_sequence(engine: Engine, harmed: int) -> None:
    """A shorter sequence's context is padded to a longer one's, in the same pass."""
    expected = text_alone(engine, PROMPTS[0])
    sequences = [start(engine, PROMPTS[0]), start(engine, PROMPTS[1] * 4)]
    while not all(len(sequence.tokens) > sequence.prompt_length for sequence in sequences):
        engine.step()
    other = engine.open(8, 1, SAMPLING)
    engine.submit(plain_decoding(other.number, 0, tuple(range(8)), COUNT))
    for tensor in stored(engine):  # as if a neighbour had overflowed just now
        for block in set(range(engine._cache.pool.num_blocks)) - {*sequences[harmed].blocks}:
            tensor[block * BLOCK : (block + 1) * BLOCK] = torch.nan
    results = run(engine)
    assert [type(result) for result in results if result.sequence == sequences[harmed].number].count(
        Failed
    ) == 0
    assert sequences[0].tokens[20:] == expected or harmed == 1


def test_harmful_drafted_token_is_refused_and_nothing_else(engine: Engine) -> None:
    """The text is what it is without a Draft."""
    expected = text_alone(engine, PROMPTS[0])
    not_finite(engine)
    sequence = engine.open(20, 1, SAMPLING)
    text: list[int] = []
    while len(text) < COUNT:
        first, second = (*expected[len(text) :], 5, 6)[:2]
        drafts = (
            Draft((first, POISON, second), (-1, 0, 0)),
            Draft.chain((first, second, POISON)),
            Draft((POISON, first), (-1, -1)),
        )
        known = () if text else PROMPTS[0]
        round = 1 + len(text)
        engine.submit(Decode(sequence.number, 20 + len(text) if text else 0, known, drafts[round % 3], round))
        (result,) = run(engine)
        assert isinstance(result, Decoded)
        text += result.verdict.tokens
    assert text == expected
    assert all(tensor.isfinite().all() for tensor in stored(engine))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_under_rejection_or_block_too(engine: Engine, rule: str) -> None:
    not_finite(engine)
    sampling = SAMPLING.model_copy(update={"verification": rule})
    sequence = engine.open(20, 1, sampling)
    certain = [SparseProbs((token,), (1.0,)) for token in (9, POISON)]
    engine.submit(Decode(sequence.number, 0, PROMPTS[0], Draft.chain((9, POISON), certain), round=1))
    (result,) = run(engine)
    assert isinstance(result, Decoded)
    assert POISON not in result.verdict.tokens


def test_out_of_memory_is_met_with_less(engine: Engine) -> None:
    """Half of the sequences at a time, and half of a prompt."""
    expected = [text_alone(engine, prompt) for prompt in PROMPTS]
    sizes: list[int] = []

    def small(batch: Batch) -> None:
        sizes.append(batch.num_tokens)
        if sizes[-1] > 8:
            raise RuntimeError(f"DefaultCPUAllocator: {NO_MEMORY[0]}")

    before_passes(engine, small)
    sequences = [start(engine, prompt) for prompt in PROMPTS]
    assert texts(run(engine), sequences) == expected
    assert max(sizes) > 8
    long = engine.open(200, 1, SAMPLING)
    engine.submit(plain_decoding(long.number, 0, PROMPTS[0] * 10, COUNT))
    while long.cached < 100:
        assert engine.step() == []

    def never(batch: Batch) -> None:
        raise RuntimeError(f"DefaultCPUAllocator: {NO_MEMORY[0]}")

    before_passes(engine, never)
    with pytest.raises(RuntimeError, match=NO_MEMORY[0]):
        run(engine)


@pytest.mark.parametrize(
    "error", [torch.AcceleratorError("CUDA error: an illegal memory access", 700), CacheLostError("moved")]
)
def test_error_of_a_broken_device_ends_the_engine(engine: Engine, error: BaseException) -> None:
    raising(lambda: error, engine)
    start(engine, PROMPTS[0])
    start(engine, POISONED)
    with pytest.raises(type(error)):
        run(engine)


def test_error_of_one_piece_of_work_fails_its_sequence(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors are raised in choosing who takes part, in choosing tokens, and in taking them."""
    expected = text_alone(engine, PROMPTS[0])
    for part in ("tree", "nodes", "rows", "take"):
        fine, harming = start(engine, PROMPTS[0]), start(engine, PROMPTS[1])

        def harm(*args: Any) -> Any:
            raise ZeroDivisionError

        monkeypatch.setattr(engine._queue.tasks[harming.number], part, harm)
        results = run(engine)
        assert [result.sequence for result in results if isinstance(result, Failed)] == [harming.number], part
        assert texts(results, [fine]) == [expected]
        engine.close(fine)


def test_prompt_beyond_the_cache_or_context_gets_empty_drafts(folder: Path) -> None:
    small = Engine.from_settings(EngineSettings(model=str(folder), block_size=BLOCK, cache_memory=2**16))
    held = small._cache.pool.num_blocks * BLOCK
    for length in (held + 1, 513):  # the context is 512
        sequence = small.open(length, 1, SAMPLING)
        for depth in (0, 4):
            small.submit(Propose(sequence.number, 0, (7,) * length, depth, round=depth))
            (result,) = run(small)
            assert isinstance(result, Proposed)
            assert not result.draft
        small.close(sequence)


def test_draft_is_made_while_it_fits_whatever_the_limit(folder: Path) -> None:
    """max_tokens of a chat is all that the context leaves."""
    small = Engine.from_settings(EngineSettings(model=str(folder), block_size=BLOCK, cache_memory=2**16))
    sequence = small.open(20, 1, Sampling(max_tokens=400))
    assert sequence.limit > small._cache.pool.num_blocks * BLOCK
    small.submit(Propose(sequence.number, 0, PROMPTS[0], 4, round=1))
    (result,) = run(small)
    assert isinstance(result, Proposed)
    assert len(result.draft) == 4


def test_branches_that_fill_the_cache_give_way(folder: Path) -> None:
    """Near the end of a sequence that fills the draft's whole cache, rounds go on."""
    settings = EngineSettings(model=str(folder), block_size=BLOCK, cache_memory=2**16, draft_ahead=12)
    small = Engine.from_settings(settings)
    held = small._cache.pool.num_blocks * BLOCK
    length = held - 40
    sequence = small.open(length, 1, Sampling(max_tokens=40, ignore_eos=True))
    tokens: tuple[int, ...] = tuple(3 + place * 37 % 200 for place in range(length))
    base, number = 0, 0
    while base + len(tokens) < held - 2:
        number += 1
        small.submit(Propose(sequence.number, base, tokens, 8, round=number))
        drafts = [result.draft for result in run(small) if isinstance(result, Proposed)]
        base += len(tokens)
        tokens = (*drafts[-1].tokens[:1], 5)
    assert number > 10


def test_prompts_that_arrive_together_share_what_they_have_in_common(folder: Path) -> None:
    """It is computed once, by the oldest; the others go on from there."""
    engine = Engine.from_settings(EngineSettings(model=str(folder), block_size=BLOCK, cache_memory=2**22))
    prompt = tuple(3 + place * 37 % 200 for place in range(201))
    sequences = [start(engine, prompt, key) for key in range(8)]
    computed = 0
    while any(sequence.cached < len(prompt) for sequence in sequences):
        engine.step()
        assert engine.last_step is not None
        computed += engine.last_step.tokens
    own = 1 + COUNT  # the prompt's last token, and what follows
    assert computed <= len(prompt) + len(sequences) * own
    assert len({block for sequence in sequences for block in sequence.blocks}) <= 200 // BLOCK + 2 * len(
        sequences
    )
    assert not any(isinstance(result, Failed) for result in run(engine))
    fresh = Engine.from_settings(engine.settings)
    for key, sequence in enumerate(sequences):
        text = tuple(sequence.tokens)
        engine.close(sequence)
        alone = start(fresh, prompt, key)
        run(fresh)
        assert tuple(alone.tokens) == text
        fresh.close(alone)


def scored(engine: Engine, company: tuple[int, ...] | None) -> list[float]:
    """Log-probabilities of a prompt's tokens, told by a step that others may take part in."""
    prompt = (5, 6, 7, 8)
    sequences = [engine.open(len(prompt), 77, Sampling(temperature=1.0, max_tokens=20, logprobs=0))]
    engine.submit(Score(sequences[0].number, 0, prompt, 1))
    if company is not None:
        sequences.append(start(engine, company))
    (found,) = (result for result in run(engine) if isinstance(result, Scored))
    for sequence in sequences:
        engine.close(sequence)
    return [position.chosen for position in found.logprobs]


def test_output_of_a_graph_survives_another_pass_for_a_harmful_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay writes over what the one before it gave. The harmful one raises as it asks for its rows."""
    monkeypatch.setattr(graphs, "CAPTURED_SIZES", (4,))
    small = write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    with gpu():
        engine = Engine.from_settings(
            EngineSettings(
                model=str(small),
                device="cuda",
                dtype="float32",
                block_size=BLOCK,
                cache_memory=2**18,
                prefill_chunk=16,
                max_sequences=4,
                self_check=False,
            )
        )
        expected = scored(engine, None)
        assert scored(engine, (9,)) == expected
        assert engine.last_step is not None
        assert engine.last_step.path == "graph"
        rows = DecodeTask.rows
        monkeypatch.setattr(
            DecodeTask, "rows", lambda self: refused() if POISON in self.sequence.tokens else rows(self)
        )
        assert scored(engine, (POISON,)) == expected


def refused() -> None:
    raise GrammarError("asks for too much")
