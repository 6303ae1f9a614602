"""The paged cache as the engine uses it: shared prefixes, eviction, and no trace of refused drafts."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.decoding.draft import ROOT, Draft
from outrider.decoding.settings import Sampling
from outrider.engine.cache.blocks import BlockPool
from outrider.engine.cache.narrow import NARROW
from outrider.engine.cache.paged_cache import PagedCache, composed
from outrider.engine.inputs.step_input import NO_PAIRS, Changes, Move
from outrider.engine.loop.engine import Engine
from outrider.engine.sequence import NO_DRAFT, EngineSequence
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Decode, Decoded, plain_decoding
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.simulated_cuda.counts import Counts
from tests.support.simulated_cuda.install import needs_compiler, simulated_cuda

BLOCK = 4
GREEDY = Sampling(temperature=0, max_tokens=64)
PROMPT = tuple(random.Random(3).choices(range(3, VOCAB_SIZE), k=18))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("llama"), "llama"))


@pytest.fixture
def engine(folder: str) -> Engine:
    return Engine.from_settings(EngineSettings(model=folder, block_size=BLOCK, cache_memory=2**22))


def plain(engine: Engine, prompt: tuple[int, ...], count: int) -> list[int]:
    sequence = engine.open(len(prompt), 0, GREEDY)
    engine.submit(plain_decoding(sequence.number, 0, prompt, count))
    tokens = []
    while engine.has_work:
        tokens += [result.verdict.tokens[-1] for result in engine.step() if isinstance(result, Decoded)]
    engine.close(sequence)
    return tokens


def fed(engine: Engine, prompt: tuple[int, ...]) -> int:
    """Tokens of the prompt that are computed rather than found in the cache."""
    sequence = engine.open(len(prompt), 0, GREEDY)
    engine.submit(Decode(sequence.number, 0, prompt, Draft(), 1))
    tokens = 0
    while engine.has_work:
        engine.step()
        assert engine.last_step is not None
        tokens += engine.last_step.tokens
    engine.close(sequence)
    return tokens


def verified(engine: Engine) -> Decoded:
    results: list[Decoded] = []
    while engine.has_work:
        results += [result for result in engine.step() if isinstance(result, Decoded)]
    assert len(results) == 1
    return results[0]


def test_second_prompt_computes_only_tokens_after_the_last_common_block(engine: Engine) -> None:
    assert fed(engine, PROMPT) == len(PROMPT)
    assert fed(engine, PROMPT) == len(PROMPT) - 16
    other = (*PROMPT[:10], 7, 8, 9)
    assert fed(engine, other) == len(other) - 8


def test_first_result_tells_the_prompt_tokens_that_were_cached_before(engine: Engine) -> None:
    told = []
    for _ in range(2):
        sequence = engine.open(len(PROMPT), 0, GREEDY)
        engine.submit(plain_decoding(sequence.number, 0, PROMPT, 3))
        results = []
        while engine.has_work:
            results += [result for result in engine.step() if isinstance(result, Decoded)]
        told.append([result.timings.adopted for result in results])
        engine.close(sequence)
    assert told == [[0, 0, 0], [len(PROMPT) // BLOCK * BLOCK, 0, 0]]


def test_prompt_that_was_preempted_tells_no_cached_tokens_of_its_own(engine: Engine) -> None:
    """What it finds again it has computed itself."""
    fed(engine, PROMPT)
    sequence = engine.open(len(PROMPT), 0, GREEDY)
    sequence.tokens, sequence.preemptions = [*PROMPT], 1
    engine._cache.adopt_prefix(sequence)
    assert (sequence.cached > 0, sequence.adopted) == (True, 0)


def test_sequence_that_goes_on_elsewhere_tells_no_cached_prompt(engine: Engine) -> None:
    """A target that takes over finds the prompt in its cache, which the request has paid already."""
    text = plain(engine, PROMPT, 6)
    sequence = engine.open(len(PROMPT), 0, GREEDY)
    engine.submit(Decode(sequence.number, 0, (*PROMPT, *text[:3]), Draft(), 1))
    assert verified(engine).timings.adopted == 0
    assert sequence.cached > len(PROMPT)


def test_shared_prefix_changes_no_token(engine: Engine) -> None:
    first = plain(engine, PROMPT, 20)
    assert plain(engine, PROMPT, 20) == first


def test_refused_drafted_tokens_never_enter_the_prefix_cache(engine: Engine) -> None:
    refused = tuple((token + 1) % VOCAB_SIZE for token in plain(engine, PROMPT, 12))
    sequence = engine.open(len(PROMPT), 0, GREEDY)
    engine.submit(Decode(sequence.number, 0, PROMPT, Draft.chain(refused), 1))
    assert verified(engine).verdict.accepted == ()
    engine.close(sequence)
    published = len(PROMPT) // BLOCK * BLOCK
    assert fed(engine, (*PROMPT, *refused, 5)) == len(PROMPT) + len(refused) + 1 - published


def test_accepted_tokens_enter_it_once_they_fill_a_block(engine: Engine) -> None:
    text = plain(engine, PROMPT, 12)
    fresh = Engine.from_settings(engine.settings)
    sequence = fresh.open(len(PROMPT), 0, GREEDY)
    fresh.submit(Decode(sequence.number, 0, PROMPT, Draft.chain(text[:8]), 1))
    assert len(verified(fresh).verdict.accepted) == 8
    fresh.close(sequence)
    whole = (*PROMPT, *text[:8], 5)
    assert fed(fresh, whole) == len(whole) - (len(PROMPT) + 8) // BLOCK * BLOCK


def test_tree_keeps_the_cache_of_the_accepted_path_alone(engine: Engine) -> None:
    text = plain(engine, PROMPT, 12)
    wrong = [(token + 1) % VOCAB_SIZE for token in text]
    # The right branch comes second at each level, so that its cache has to move into place.
    tree = Draft((wrong[0], text[0], wrong[1], text[1], text[2]), (-1, -1, 1, 1, 3))
    sequence = engine.open(len(PROMPT), 0, GREEDY)
    engine.submit(Decode(sequence.number, 0, PROMPT, tree, 1))
    verdict = verified(engine).verdict
    assert verdict.accepted == (1, 3, 4)
    assert list(verdict.tokens) == text[:4]
    engine.submit(plain_decoding(sequence.number, len(sequence.tokens), (), 8))
    rest = []
    while engine.has_work:
        rest += [result.verdict.tokens[-1] for result in engine.step() if isinstance(result, Decoded)]
    assert rest == text[4:12]


def stored(cache: PagedCache, sequence: EngineSequence) -> list[tuple[float, float]]:
    """Key and value of every written slot, as the next forward pass finds them."""
    cache.make(cache.take_changes())
    places = range(sequence.written)
    slots = [sequence.blocks[place // BLOCK] * BLOCK + place % BLOCK for place in places]
    return [(cache.keys[0][slot].item(), cache.values[0][slot].item()) for slot in slots]


def grown(rng: random.Random) -> tuple[PagedCache, EngineSequence]:
    """A sequence with a random tree pending, in blocks out of order; each key and value tells its token."""
    cache = PagedCache({0: (1, 1, 1)}, 16, BLOCK, torch.float32, torch.device("cpu"))
    held = cache.pool.allocate(5)
    for block in rng.sample(held, 5):
        cache.pool.release(block)
    length, nodes = rng.randrange(1, 12), rng.randrange(16)
    sequence = EngineSequence(0, length, 0, GREEDY, frozenset(), 100)
    sequence.tokens = list(range(length))
    parents = [rng.randrange(ROOT, node) if node else ROOT for node in range(nodes)]
    assert cache.reserve(sequence, length + nodes)
    sequence.cached = length
    cache.publish(sequence)
    sequence.pending = Draft(tuple(range(100, 100 + nodes)), tuple(parents))
    sequence.draft.top_tokens = {node: (1000 + node,) for node in range(ROOT, nodes) if rng.random() < 0.8}
    for place, token in enumerate((*sequence.tokens, *sequence.pending.tokens)):
        slot = sequence.blocks[place // BLOCK] * BLOCK + place % BLOCK
        cache.keys[0][slot], cache.values[0][slot] = token, -token
    return cache, sequence


@pytest.mark.parametrize("seed", range(50))
def test_kept_branch_stays_pending_with_its_choices(seed: int) -> None:
    rng = random.Random(seed)
    cache, sequence = grown(rng)
    length, pending, top_tokens = sequence.cached, sequence.pending, sequence.draft.top_tokens
    last = rng.randrange(ROOT, len(pending))
    path = pending.path(last)
    committed = [*sequence.tokens, *(pending.tokens[node] for node in path)]
    kept = [node for node in range(len(pending)) if last in (ROOT, *pending.path(node)[:-1])]
    cache.keep_branch(sequence, path)
    assert sequence.cached == length + len(path)
    tokens = [*committed, *(pending.tokens[node] for node in kept)]
    assert stored(cache, sequence) == [(token, -token) for token in tokens]
    assert sequence.pending == pending.after([pending.tokens[node] for node in path])
    expected = {ROOT: top_tokens.get(last)} | {place: top_tokens.get(node) for place, node in enumerate(kept)}
    assert sequence.draft.top_tokens == {node: best for node, best in expected.items() if best is not None}


def test_moves_at_once_do_what_they_do_one_after_the_other() -> None:
    """Also where one reads or writes what another wrote."""
    rng = random.Random(0)
    for _ in range(50):
        moves = []
        for count in rng.choices(range(4), k=5):
            source, target = (np.array(rng.sample(range(8), count), np.int64) for _ in range(2))
            moves.append(Move(source, target))
        expected = np.arange(8)
        for move in moves:
            expected[move.target] = expected[move.source]
        slots, at_once = np.arange(8), composed(moves)
        slots[at_once.target] = slots[at_once.source]
        assert (slots == expected).all()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, NARROW], ids=str)
def test_moves_cost_the_same_however_many_they_are(dtype: torch.dtype) -> None:
    """Launches on a GPU: one copy, and for keys and for values a reading, a writing and a filling."""
    moves = [Move(np.arange(8, 8 + count), np.arange(count)) for count in (1, 3, 2)]
    with simulated_cuda() as cuda:
        cache = PagedCache(dict.fromkeys(range(4), (2, 8, 8)), 6, BLOCK, dtype, torch.device("cuda"))
        keys = cache.keys[3]
        numbers = torch.arange(keys.numel(), device="cuda") % 13 + 1
        keys.copy_(numbers.view_as(keys))
        before = keys.clone()
        cuda.counts = Counts()
        cache.make(Changes(moves, np.arange(20, 24), [], NO_PAIRS))
        assert cuda.counts.totals() == {
            "launches": 6,
            "pinned_copies": 1,
            "pageable_copies": 0,
            "copies_out": 0,
            "waits": 0,
            "busy_waits": 0,
        }
        assert keys[:3].float().tolist() == before[8:11].float().tolist()
        assert keys[3:20].float().tolist() == before[3:20].float().tolist()
        assert not keys[20:24].float().any()


@pytest.mark.parametrize("seed", range(50))
def test_shrinking_frees_what_only_pending_nodes_fill(seed: int) -> None:
    cache, sequence = grown(random.Random(seed))
    length, before, blocks = sequence.cached, cache.pool.available, list(sequence.blocks)
    written = stored(cache, sequence)
    needed = -(-length // BLOCK)
    cache.shrink(sequence)
    assert [*sequence.blocks] == blocks[:needed]
    assert cache.pool.available == before + len(blocks) - needed
    assert sequence.cached == length
    assert stored(cache, sequence) == written[:length]
    assert (sequence.pending, sequence.draft.top_tokens) == (NO_DRAFT, {})
    other = EngineSequence(1, length + 1, 0, GREEDY, frozenset(), 100)
    other.tokens = [*sequence.tokens, 5]
    cache.adopt_prefix(other)
    assert other.cached == length // BLOCK * BLOCK


def test_everything_is_given_back_at_the_end(engine: Engine) -> None:
    before = engine.load().free_blocks
    plain(engine, PROMPT, 20)
    assert engine.load().free_blocks == before


def test_least_recently_used_block_is_evicted_first() -> None:
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


def test_block_in_use_is_never_evicted() -> None:
    pool = BlockPool(2)
    (used,) = pool.allocate(1)
    pool.publish(used, b"used")
    pool.share(used)
    pool.release(used)
    pool.allocate(1)
    assert pool.available == 0
    with pytest.raises(ValueError, match="exceeds the 0 blocks"):
        pool.allocate(1)


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_taken_as_the_cache_is_written(dtype: torch.dtype) -> None:
    before = resident()
    cache = PagedCache({0: (4, 64, 64), 1: (2, 32, 16)}, 2**15, 16, dtype, torch.device("cpu"))
    size = sum(stored.nbytes for stored in (*cache.keys.values(), *cache.values.values()))
    assert size > 2**29
    assert resident() - before < size // 50
    cache.keys[0][: 2**15].fill_(1.0)
    written = cache.keys[0][: 2**15].nbytes
    assert 0.9 * written < resident() - before < written + size // 50


def test_unwritten_cache_is_zero() -> None:
    cache = PagedCache({0: (4, 64, 32)}, 2**10, 16, torch.float32, torch.device("cpu"))
    for stored in (cache.keys[0], cache.values[0]):
        assert not stored.any()
        stored[cache.spare_block * 16 :] = 1.0  # also the last block is there
        assert stored.sum() == 16 * 4 * stored.shape[2]


def test_blocks_that_were_used_are_used_again_before_fresh_ones() -> None:
    pool = BlockPool(100)
    for _ in range(3):
        blocks = pool.allocate(8)
        assert blocks == list(range(8))
        for block in reversed(blocks):
            pool.release(block)
