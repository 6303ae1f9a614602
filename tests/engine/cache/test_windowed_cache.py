"""Layers with a sliding window keep only what a window reaches, and no text shows it."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from outrider.decoding.draft import Draft
from outrider.decoding.settings import Sampling
from outrider.engine.cache.windowed_blocks import WindowedLayers
from outrider.engine.loop import load
from outrider.engine.loop.engine import Engine
from outrider.engine.planning.memory import Pools, block_bytes, pool_bytes, pools_of
from outrider.engine.planning.memory_plan import plan_memory
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.sequence import EngineSequence
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Decode, Decoded, plain_decoding
from tests.support.allocated import allocated_cache
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.windows import engine_with_pools, forget_prefixes, windows_of

BLOCK, WINDOW = 4, 24
COUNT = 3 * WINDOW  # tokens of an answer
GREEDY = Sampling(temperature=0, max_tokens=2 * COUNT)
MIXED = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
# In gpt-oss each other layer slides, and here all layers of Mistral do.
KINDS: dict[str, dict[str, Any]] = {"gpt_oss": {}, "gemma3_text": MIXED, "mistral": {}}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    kind = request.param
    return str(write_checkpoint(tmp_path_factory.mktemp(kind), kind, **KINDS[kind]))


def engine_with(folder: str, pools: Pools) -> Engine:
    settings = EngineSettings(
        model=folder, block_size=BLOCK, prefill_chunk=40, self_check=False, threads=1, cache_memory=2**20
    )
    return engine_with_pools(settings, pools)


@pytest.fixture(scope="module")
def whole(folder: str) -> Engine:
    """An engine whose windowed layers keep all tokens."""
    return engine_with(folder, Pools(400))


@pytest.fixture(scope="module", params=["kernel", "gathered"])
def engine(folder: str, request: pytest.FixtureRequest) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "gathered":
            patch.setattr(load, "find_kernel", lambda *_, **__: "a test asks for none")
        return engine_with(folder, Pools(400, 40))


@pytest.fixture(autouse=True)
def all_is_free(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks that a test leaves no block in use."""
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        for pool in (engine._cache.pool, windows_of(engine).pool):
            assert pool.available == pool.num_blocks


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, VOCAB_SIZE), k=length))


def run(engine: Engine, sequences: Sequence[EngineSequence], *, forgets: bool = False) -> list[list[int]]:
    """Runs an engine. forgets: whether blocks are free, and NaN, once no sequence holds them."""
    tokens: dict[int, list[int]] = {sequence.number: [] for sequence in sequences}
    while engine.has_work:
        if forgets:
            forget_prefixes(engine)
        for result in engine.step():
            assert isinstance(result, Decoded), result
            tokens[result.sequence] += result.verdict.tokens
        for held in [sequence.window for sequence in sequences] if forgets else ():
            assert held.end - held.first <= windows_of(engine).windowed.blocks_of_sequence(BLOCK)
    return [*tokens.values()]


def plain(engine: Engine, prompt: tuple[int, ...], count: int = COUNT, *, forgets: bool = False) -> list[int]:
    sequence = engine.open(len(prompt), 0, GREEDY)
    engine.submit(plain_decoding(sequence.number, 0, prompt, count))
    (tokens,) = run(engine, [sequence], forgets=forgets)
    engine.close(sequence)
    return tokens


def fed(engine: Engine, prompt: tuple[int, ...]) -> int:
    """Tokens of the prompt that are computed, not found in the cache."""
    sequence = engine.open(len(prompt), 0, GREEDY)
    engine.submit(Decode(sequence.number, 0, prompt, Draft(), 1))
    tokens = 0
    while engine.has_work:
        engine.step()
        assert engine.last_step is not None
        tokens += engine.last_step.tokens
    engine.close(sequence)
    return tokens


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("windows", [1, 2, 3, 4])
def test_text_is_that_of_a_cache_without_windows(engine: Engine, whole: Engine, windows: int) -> None:
    prompt = prompt_of(windows * WINDOW + 3)
    assert plain(engine, prompt, forgets=True) == plain(whole, prompt)


def tree_at(text: Sequence[int], length: int, rng: random.Random) -> Draft:
    """A Draft after ``length`` tokens of an answer: a part of it is correct, often off the chain."""
    parents, tokens, last = list[int](), list[int](), -1
    for token in text[length : length + rng.randrange(1, 8)]:
        siblings = [(token + 1) % VOCAB_SIZE, token] if rng.random() < 0.5 else [token]
        for sibling in siblings:
            parents.append(last)
            tokens.append(sibling)
        if rng.random() < 0.15:
            break
        last = len(tokens) - 1
    wrong = [(token + 7) % VOCAB_SIZE for token in text[:3]]
    parents += [len(tokens) + place - 1 for place in range(len(wrong))]
    return Draft((*tokens, *wrong), tuple(parents))


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("length", [WINDOW - 2, 2 * WINDOW, 4 * WINDOW + 1])
def test_text_with_drafts_is_that_of_plain_decoding(engine: Engine, whole: Engine, length: int) -> None:
    rng, prompt = random.Random(length), prompt_of(length)
    expected = plain(whole, prompt)
    sequence = engine.open(length, 0, GREEDY)
    text, number, new = list[int](), 0, prompt
    while len(text) < COUNT - 8:
        number += 1
        base = length + len(text) - (0 if number == 1 else len(new))
        draft = tree_at(expected, len(text), rng)
        engine.submit(Decode(sequence.number, base if number > 1 else 0, new, draft, number))
        (told,) = run(engine, [sequence], forgets=True)
        text, new = [*text, *told], tuple(told)
    assert text == expected[: len(text)]
    engine.close(sequence)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("back", [1, WINDOW // 2, 3 * WINDOW])
def test_sequence_rolled_back_goes_on_as_from_scratch(engine: Engine, whole: Engine, back: int) -> None:
    """Within the margin it keeps its cache; further back it computes what it needs again."""
    prompt = prompt_of(4 * WINDOW)
    sequence = engine.open(len(prompt), 0, GREEDY)
    engine.submit(plain_decoding(sequence.number, 0, prompt, COUNT))
    (text,) = run(engine, [sequence], forgets=True)
    kept = text[: COUNT - back]
    other = (text[COUNT - back] + 1) % VOCAB_SIZE
    expected = plain(whole, (*prompt, *kept, other), 10)
    engine.submit(plain_decoding(sequence.number, len(prompt) + len(kept), (other,), 10, round=1))
    assert run(engine, [sequence], forgets=True) == [expected]
    engine.close(sequence)


@pytest.mark.slow_beyond_first
def test_prefix_is_shared_up_to_a_place_that_has_a_whole_window(engine: Engine, whole: Engine) -> None:
    common = prompt_of(5 * WINDOW)
    texts = [(*common[:length], *prompt_of(9, seed)) for seed, length in enumerate((100, 12, 60, 60, 120))]
    expected = [plain(whole, text) for text in texts]
    assert [plain(engine, text) for text in texts] == expected


@pytest.mark.slow_beyond_first
def test_prefix_whose_window_was_evicted_is_computed_again_and_shared_again(engine: Engine) -> None:
    prompt = prompt_of(4 * WINDOW + 2, seed=1)
    assert fed(engine, prompt) == len(prompt)
    assert fed(engine, prompt) == len(prompt) % BLOCK
    expected = plain(engine, prompt)
    pool = windows_of(engine).pool
    for block in pool.allocate(pool.num_blocks):  # evicts every published block
        pool.release(block)
    assert fed(engine, prompt) == len(prompt)
    assert fed(engine, prompt) == len(prompt) % BLOCK
    assert plain(engine, prompt) == expected


@pytest.mark.slow_beyond_first
def test_sequence_that_waits_for_a_prefix_takes_it_over_chunk_by_chunk(engine: Engine, whole: Engine) -> None:
    common = prompt_of(5 * WINDOW, seed=2)
    prompts = [(*common, 5, 6, 7), (*common, 8, 9)]
    expected = [plain(whole, prompt) for prompt in prompts]
    sequences = [engine.open(len(prompt), 0, GREEDY) for prompt in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        engine.submit(plain_decoding(sequence.number, 0, prompt, COUNT))
    assert run(engine, sequences) == expected
    for sequence in sequences:
        engine.close(sequence)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("pools", [Pools(400, 32), Pools(60, 40)], ids=["few windows", "few blocks"])
def test_full_pool_preempts_and_changes_no_token(folder: str, whole: Engine, pools: Pools) -> None:
    prompts = [prompt_of(length, length) for length in (40, 70, 20, 85)]
    expected = [plain(whole, prompt) for prompt in prompts]
    engine = engine_with(folder, pools)
    sequences = [engine.open(len(prompt), 0, GREEDY) for prompt in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        engine.submit(plain_decoding(sequence.number, 0, prompt, COUNT))
    assert run(engine, sequences, forgets=True) == expected
    for sequence in sequences:
        engine.close(sequence)
    for pool in (engine._cache.pool, windows_of(engine).pool):
        assert pool.available == pool.num_blocks


@pytest.mark.parametrize(
    ("blocks", "sequences", "windowed"),
    [
        pytest.param(10_000, 20, 20 * 2 * 28, id="two windows of each sequence"),
        pytest.param(10_000, 256, 5_000, id="half of the blocks"),
        pytest.param(10_000, 1, 284, id="what one sequence needs"),
        pytest.param(560, 256, 0, id="too few blocks for one sequence"),
    ],
)
def test_pools_divide_the_memory_of_one_pool(blocks: int, sequences: int, windowed: int) -> None:
    settings = EngineSettings(model="none", block_size=BLOCK, prefill_chunk=50, max_sequences=sequences)
    shapes, layers = {0: (2, 16, 16), 1: (2, 16, 16), -1: (1, 16, 16)}, WindowedLayers(frozenset({0}), WINDOW)
    pools = pools_of(blocks, settings, shapes, layers, torch.float32, 1000)
    assert pools.num_windowed == windowed
    block = block_bytes(settings, shapes, torch.float32)
    assert 0 <= blocks * block - pool_bytes(pools, settings, shapes, layers, torch.float32) < block


def test_plan_counts_what_an_engine_allocates(folder: str) -> None:
    settings = EngineSettings(model=folder, block_size=BLOCK, prefill_chunk=40, cache_memory=2**23, threads=1)
    plan, engine = plan_memory(skeleton(settings), settings, 2**30), Engine.from_settings(settings)
    assert plan.cache == allocated_cache(engine._cache)
    blocks, windowed = engine._cache.pool.num_blocks, windows_of(engine).pool.num_blocks
    assert (plan.num_blocks, plan.windowed_blocks) == (blocks, windowed)
    assert plan.sequences(WINDOW) == min(windowed, blocks) // (WINDOW // BLOCK)
    assert plan.sequences(400) == min(blocks // 100, windowed // 28)
