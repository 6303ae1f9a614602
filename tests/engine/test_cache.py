"""The paged cache as the engine uses it: shared prefixes, eviction, and no trace of refused drafts."""

import random

import pytest

from decoding.draft import Draft
from decoding.settings import Sampling
from engine.blocks import BlockPool
from engine.engine import Engine
from engine.settings import EngineSettings
from engine.work import Generate, Generated, Verified, Verify
from tests.engine.checkpoints import VOCAB_SIZE, write_checkpoint

BLOCK = 4
GREEDY = Sampling(temperature=0, max_tokens=64)
PROMPT = tuple(random.Random(3).choices(range(3, VOCAB_SIZE), k=18))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("llama"), "llama"))


@pytest.fixture
def engine(folder: str) -> Engine:
    return Engine(EngineSettings(model=folder, block_size=BLOCK, cache_memory=2**22))


def plain(engine: Engine, prompt: tuple[int, ...], count: int) -> list[int]:
    sequence = engine.open(len(prompt), 0, GREEDY)
    engine.submit(Generate(sequence, 0, prompt, count))
    tokens = []
    while engine.has_work:
        tokens += [result.token for result in engine.step() if isinstance(result, Generated)]
    engine.close(sequence)
    return tokens


def fed(engine: Engine, prompt: tuple[int, ...]) -> int:
    """Tokens of the prompt that are computed rather than found in the cache."""
    sequence = engine.open(len(prompt), 0, GREEDY)
    engine.submit(Verify(sequence, 0, prompt, Draft(), 1))
    tokens = 0
    while engine.has_work:
        engine.step()
        assert engine.last_step is not None
        tokens += engine.last_step.tokens
    engine.close(sequence)
    return tokens


def verified(engine: Engine) -> Verified:
    results: list[Verified] = []
    while engine.has_work:
        results += [result for result in engine.step() if isinstance(result, Verified)]
    assert len(results) == 1
    return results[0]


def test_a_second_prompt_computes_only_what_follows_the_last_full_common_block(engine: Engine) -> None:
    assert fed(engine, PROMPT) == len(PROMPT)
    assert fed(engine, PROMPT) == len(PROMPT) - 16
    other = (*PROMPT[:10], 7, 8, 9)
    assert fed(engine, other) == len(other) - 8


def test_a_shared_prefix_changes_no_token(engine: Engine) -> None:
    first = plain(engine, PROMPT, 20)
    assert plain(engine, PROMPT, 20) == first


def test_refused_drafted_tokens_never_enter_the_prefix_cache(engine: Engine) -> None:
    refused = tuple((token + 1) % VOCAB_SIZE for token in plain(engine, PROMPT, 12))
    sequence = engine.open(len(PROMPT), 0, GREEDY)
    engine.submit(Verify(sequence, 0, PROMPT, Draft.chain(refused), 1))
    assert verified(engine).verdict.accepted == ()
    engine.close(sequence)
    published = len(PROMPT) // BLOCK * BLOCK
    assert fed(engine, (*PROMPT, *refused, 5)) == len(PROMPT) + len(refused) + 1 - published


def test_accepted_tokens_enter_it_once_they_fill_a_block(engine: Engine) -> None:
    text = plain(engine, PROMPT, 12)
    fresh = Engine(engine.settings)
    sequence = fresh.open(len(PROMPT), 0, GREEDY)
    fresh.submit(Verify(sequence, 0, PROMPT, Draft.chain(text[:8]), 1))
    assert len(verified(fresh).verdict.accepted) == 8
    fresh.close(sequence)
    whole = (*PROMPT, *text[:8], 5)
    assert fed(fresh, whole) == len(whole) - (len(PROMPT) + 8) // BLOCK * BLOCK


def test_a_tree_keeps_the_cache_of_the_accepted_path_alone(engine: Engine) -> None:
    text = plain(engine, PROMPT, 12)
    wrong = [(token + 1) % VOCAB_SIZE for token in text]
    # The right branch comes second at each level, so that its cache has to move into place.
    tree = Draft((wrong[0], text[0], wrong[1], text[1], text[2]), (-1, -1, 1, 1, 3))
    sequence = engine.open(len(PROMPT), 0, GREEDY)
    engine.submit(Verify(sequence, 0, PROMPT, tree, 1))
    verdict = verified(engine).verdict
    assert verdict.accepted == (1, 3, 4)
    assert list(verdict.tokens) == text[:4]
    engine.submit(Generate(sequence, len(sequence.tokens), (), 8))
    rest = []
    while engine.has_work:
        rest += [result.token for result in engine.step() if isinstance(result, Generated)]
    assert rest == text[4:12]


def test_everything_is_given_back_at_the_end(engine: Engine) -> None:
    before = engine.load().free_blocks
    plain(engine, PROMPT, 20)
    assert engine.load().free_blocks == before


def test_the_least_recently_used_block_is_evicted_first() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, b"first")
    pool.publish(second, b"second")
    pool.release(first)
    pool.release(second)
    pool.share(first)  # used again: now the second is the older one
    pool.release(first)
    pool.allocate(1)
    assert pool.find(b"second") is None
    assert pool.find(b"first") == first


def test_a_block_in_use_is_never_evicted() -> None:
    pool = BlockPool(2)
    (used,) = pool.allocate(1)
    pool.publish(used, b"used")
    pool.share(used)
    pool.release(used)
    pool.allocate(1)
    assert pool.available == 0
    with pytest.raises(ValueError, match="exceeds the 0 blocks"):
        pool.allocate(1)
