"""Sequences of a model with recurrent states that begin alike: they share what was computed, bit for bit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from outrider.decoding.draft import Draft
from outrider.decoding.settings import Sampling
from outrider.engine.blame import NO_MEMORY
from outrider.engine.forward.batch import Batch
from outrider.engine.forward.batch_invariant import Passes
from outrider.engine.forward.output import ForwardOutput
from outrider.engine.forward.recurrent_layer import RecurrentLayer
from outrider.engine.loop.engine import Engine
from outrider.engine.sequence import EngineSequence
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Decode, Decoded, Failed, plain_decoding
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.engine_runs import run
from tests.support.functions import are_equal
from tests.support.hybrid import TOKENS, Asked, chain, in_rounds, plain, requests, tree
from tests.support.model import forward_of, model_of

BLOCK = 8
RNG = Random(7)
LONG = tuple(RNG.choices(range(3, VOCAB_SIZE - 1), k=100))  # 12 blocks and 4 tokens
POISON = VOCAB_SIZE - 1


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_5_text",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_next", "nemotron_h")),
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def engine_with(folder: Path) -> Callable[..., Engine]:
    def made(**settings: Any) -> Engine:
        given = {"block_size": BLOCK, "cache_memory": 2**22, "max_sequences": 8, "threads": 1} | settings
        return Engine.from_settings(EngineSettings(model=str(folder), self_check=False, **given))

    return made


@pytest.fixture(scope="module")
def unshared(engine_with: Callable[..., Engine]) -> Engine:
    """An engine that shares nothing."""
    engine = engine_with()
    engine._cache.adopt_prefix = lambda sequence: None  # type: ignore[method-assign]
    engine._cache.will_share = lambda digests, computed: False  # type: ignore[method-assign]
    return engine


@dataclass
class Seen:
    """Passes of an engine from now on."""

    engine: Engine
    tokens: int = 0  # tokens that it has computed
    logits: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        forward = forward_of(self.engine)
        compute = type(forward).run.__get__(forward)

        def seen(step: Batch | Passes, chosen: torch.Tensor | None = None) -> ForwardOutput:
            output = compute(step, chosen)
            assert isinstance(step, Batch)
            self.tokens += step.num_tokens
            self.logits.append(output.logits.clone())
            return output

        forward.run = seen  # type: ignore[method-assign]

    def computed(self, asked: Asked) -> int:
        """Tokens computed for a request alone, the first of an answer apart."""
        before = self.tokens
        text = plain(self.engine, asked)
        return self.tokens - before - len(text) + 1


def of(prompt: Sequence[int], seed: int = 1) -> Asked:
    return Asked(tuple(prompt), Sampling(temperature=0.9, max_tokens=TOKENS, seed=seed), seed)


def logits_of(engine: Engine, asked: Asked) -> tuple[tuple[int, ...], torch.Tensor]:
    seen = Seen(engine)
    text = plain(engine, asked)
    return text, torch.cat(seen.logits)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("chunk", [7, 16, 512])
def test_second_request_with_a_prompt_computes_its_last_tokens_alone_with_the_same_logits(
    engine_with: Callable[..., Engine], unshared: Engine, chunk: int
) -> None:
    engine = engine_with(prefill_chunk=chunk)
    seen = Seen(engine)
    assert seen.computed(of(LONG)) == 100
    assert seen.computed(of(LONG, seed=2)) == 4
    assert seen.computed(of(LONG[:96])) == 96  # nothing is kept before its last token
    assert seen.computed(of(LONG[:96])) == 8
    for prompt in (LONG, LONG[:96]):
        for seed in (1, 2):
            text, logits = logits_of(engine, of(prompt, seed))
            expected, alone = logits_of(unshared, of(prompt, seed))
            assert text == expected
            assert are_equal(logits, alone)


def test_third_request_goes_on_at_the_place_at_which_the_second_branched_off(
    engine_with: Callable[..., Engine], unshared: Engine
) -> None:
    engine = engine_with(prefill_chunk=16)
    seen = Seen(engine)
    asked = [of((*LONG[:60], *LONG[seed * 7 : seed * 7 + 30]), seed) for seed in range(4)]
    assert [seen.computed(each) for each in asked] == [90, 90, 90 - 56, 90 - 56]
    for each in asked:
        text, logits = logits_of(engine, each)
        expected, alone = logits_of(unshared, each)
        assert text == expected
        assert are_equal(logits, alone)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("kind", ["plain", "chain", "tree"])
@pytest.mark.parametrize("correct", [0, 2, 4])
def test_next_turn_goes_on_in_the_answer_that_drafts_have_made(
    engine_with: Callable[..., Engine], unshared: Engine, kind: str, correct: int
) -> None:
    engine, first = engine_with(prefill_chunk=32), of(LONG)
    answer = plain(unshared, first)
    if kind == "plain":
        assert plain(engine, first) == answer
    else:
        assert rounds(engine, first, answer, kind, correct) == answer
    second = of((*LONG, *answer, *LONG[50:70]), seed=3)
    begun = (len(LONG) + len(answer) - 1) // BLOCK * BLOCK
    if kind != "plain" and correct:  # the last Verdict was never replayed
        begun = (len(LONG) + len(answer) - 2 - correct) // BLOCK * BLOCK
    computed = Seen(engine).computed(second)
    assert computed <= len(second.prompt) - begun
    text, logits = logits_of(engine, second)
    expected, alone = logits_of(unshared, second)
    assert text == expected
    assert are_equal(logits, alone)


def rounds(
    engine: Engine, asked: Asked, expected: tuple[int, ...], kind: str, correct: int
) -> tuple[int, ...]:
    """The text of a request in rounds, in each of which so many guesses are correct."""
    sequence = engine.open(len(asked.prompt), asked.noise_key, asked.sampling)
    text, tokens = tuple[int, ...](), asked.prompt
    while len(text) < len(expected):
        rest = expected[len(text) :]
        draft = tree(rest, correct) if kind == "tree" else chain(rest, correct, 3)
        engine.submit(Decode(sequence.number, len(sequence.tokens), tokens, draft, len(text)))
        (decoded,) = run(engine)
        assert isinstance(decoded, Decoded)
        text, tokens = (*text, *decoded.verdict.tokens), ()
    engine.close(sequence)
    return text


def test_every_kept_state_has_the_bits_of_a_prompt_that_ends_there(
    engine_with: Callable[..., Engine], unshared: Engine
) -> None:
    asked = requests(10)
    texts = [plain(unshared, each) for each in asked]
    engine = engine_with(cache_memory=2**17, max_sequences=16, prefill_chunk=16)
    assert in_rounds(engine, asked, texts, seed=3)[0] == texts
    kept, found = states_of(engine).kept, 0
    for each, text in zip(asked, texts, strict=True):
        sequence = engine.open(len(each.prompt), 0, each.sampling)
        sequence.tokens = [*each.prompt, *text]
        for index in range(len(sequence.tokens) // BLOCK):
            digest = engine._cache._digest(sequence, index)
            if digest in kept:
                found += 1
                place, (state, tail) = (
                    kept.use(digest),
                    state_after(unshared, sequence.tokens[: (index + 1) * BLOCK]),
                )
                assert are_equal(kept.all_states[:, place], state)
                assert are_equal(kept.all_tails[:, place], tail)
    assert found > 8


def states_of(engine: Engine) -> Any:
    states = engine._cache.states
    assert states is not None
    return states


def state_after(engine: Engine, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """State and tail of each layer after a prompt."""
    sequence = engine.open(len(tokens), 0, Sampling(max_tokens=2))
    engine.submit(plain_decoding(sequence.number, 0, tuple(tokens), 1))
    run(engine)
    states, place = states_of(engine), sequence.state.lengths.index(len(tokens))
    found = (
        states._states[:, sequence.state.slot, place].clone(),
        states._tails[:, sequence.state.slot, place].clone(),
    )
    engine.close(sequence)
    return found


def start(engine: Engine, asked: Asked) -> EngineSequence:
    sequence = engine.open(len(asked.prompt), asked.noise_key, asked.sampling)
    engine.submit(plain_decoding(sequence.number, 0, asked.prompt, TOKENS))
    return sequence


@pytest.mark.parametrize("chunk", [16, 512])
def test_prompts_that_arrive_together_compute_their_common_beginning_once(
    engine_with: Callable[..., Engine], unshared: Engine, chunk: int
) -> None:
    asked = [of((*LONG[:80], *range(3 + seed, 20 + seed)), seed) for seed in range(5)]
    texts = [plain(unshared, each) for each in asked]
    engine = engine_with(prefill_chunk=chunk)
    seen = Seen(engine)
    sequences = [start(engine, each) for each in asked]
    run(engine)
    assert [(*sequence.tokens[97:],) for sequence in sequences] == texts
    assert seen.tokens == 80 + 5 * (17 + TOKENS - 1)


def test_no_sequence_waits_for_a_state_for_which_there_is_no_memory(
    engine_with: Callable[..., Engine], unshared: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [of((*LONG[:80], *range(3 + seed, 20 + seed)), seed) for seed in range(3)]
    texts = [plain(unshared, each) for each in asked]
    engine = engine_with()
    monkeypatch.setattr(states_of(engine).kept, "lend", lambda: None)
    sequences = [start(engine, each) for each in asked]
    engine.step()
    assert [sequence.cached for sequence in sequences] == [97, 97, 97]
    run(engine)
    assert [(*sequence.tokens[97:],) for sequence in sequences] == texts


def test_waiting_sequence_whose_state_is_evicted_computes_it(
    engine_with: Callable[..., Engine], unshared: Engine
) -> None:
    asked = [of((*LONG[:80], *range(3 + seed, 20 + seed)), seed) for seed in range(2)]
    texts = [plain(unshared, each) for each in asked]
    engine = engine_with(prefill_chunk=16)
    sequences = [start(engine, each) for each in asked]
    kept = states_of(engine).kept
    while sequences[0].cached < 80:
        engine.step()
        assert sequences[1].cached == 0
    for digest, _ in [*kept._place_of.items()]:
        kept.drop(digest)
    run(engine)
    assert [(*sequence.tokens[97:],) for sequence in sequences] == texts


@pytest.mark.slow
def test_eviction_of_states_breaks_no_running_sequence(
    engine_with: Callable[..., Engine], unshared: Engine
) -> None:
    asked = requests(6)
    texts = [plain(unshared, each) for each in asked]
    engine = engine_with(max_sequences=1, prefill_chunk=16)  # two states are kept
    kept = states_of(engine).kept
    for seed in range(2):
        answers, _ = in_rounds(engine, asked, texts, seed)
        assert answers == texts
        assert len(kept._place_of) + len(kept._free) == 2


def test_state_is_forgotten_with_its_block(engine_with: Callable[..., Engine]) -> None:
    engine = engine_with(cache_memory=20 * 4096)  # 20 blocks
    kept = states_of(engine).kept
    plain(engine, of(LONG))
    assert len(kept._place_of)
    plain(engine, of([*reversed(LONG)], seed=2))
    pool = engine._cache.pool
    assert len(kept._place_of)
    assert all(pool.find(digest) is not None for digest, _ in kept._place_of.items())
    assert len(kept._place_of) + len(kept._free) == 16


def test_preempted_sequence_goes_on_from_the_newest_block_of_its_answer(
    engine_with: Callable[..., Engine], unshared: Engine
) -> None:
    engine, asked = engine_with(), of(LONG)
    text, logits = logits_of(unshared, asked)
    seen = Seen(engine)
    sequence = start(engine, asked)
    while len(sequence.tokens) < 100 + 9:
        engine.step()
    assert seen.tokens == 108
    engine._scheduler._preempt(sequence, engine._queue.tasks)
    assert not sequence.blocks
    engine.step()
    assert seen.tokens == 108 + 5  # blocks of 104 tokens were there
    run(engine)
    assert tuple(sequence.tokens[100:]) == text
    assert are_equal(torch.cat(seen.logits), logits)


def test_sequence_that_gets_its_slot_by_preemption_shares_the_prefix(
    engine_with: Callable[..., Engine],
) -> None:
    engine = engine_with(max_sequences=1)
    seen = Seen(engine)
    older, idle = (engine.open(len(LONG), key, Sampling(max_tokens=9)) for key in (4, 5))
    for sequence, computed in ((idle, 100), (older, 104)):
        engine.submit(Decode(sequence.number, 0, LONG, Draft(), 0))
        run(engine)
        assert seen.tokens == computed
    assert not idle.blocks


@pytest.mark.parametrize("back", [1, 3, 5, 30])
def test_sequence_that_goes_back_before_what_it_adopted_replays_nothing_that_is_not_there(
    engine_with: Callable[..., Engine], unshared: Engine, back: int
) -> None:
    engine, short = engine_with(), LONG[:36]  # so short that a ring of records reached back to its start
    plain(engine, of(short))
    for of_layer in states_of(engine).layers.values():
        of_layer.records.fill_(torch.nan)
    sequence = engine.open(4, 1, Sampling(temperature=0.9, max_tokens=60, seed=1))
    engine.submit(Decode(sequence.number, 0, short, Draft(), 0))
    run(engine)
    other = (*short[: 36 - back], 3, 4, 5, 6)
    engine.submit(plain_decoding(sequence.number, 36 - back, (3, 4, 5, 6), 8, round=1))
    assert not any(isinstance(result, Failed) for result in run(engine))
    assert tuple(sequence.tokens[len(other) :]) == plain(unshared, of(other))[:8]


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("back", [1, 2, 8, 15, 20])
def test_sequence_that_goes_back_into_a_published_block_keeps_its_text(
    engine_with: Callable[..., Engine], unshared: Engine, back: int
) -> None:
    engine = engine_with()
    sequence = engine.open(len(LONG), 1, Sampling(temperature=0.9, max_tokens=60, seed=1))
    engine.submit(plain_decoding(sequence.number, 0, LONG, 21))
    run(engine)
    whole, end = tuple(sequence.tokens), 121 - back
    engine.submit(plain_decoding(sequence.number, end, (7, 8), 8, round=1))
    run(engine)
    assert tuple(sequence.tokens[end + 2 :]) == plain(unshared, of((*whole[:end], 7, 8)))[:8]


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("harm", ["no memory", "NaN in company"])
def test_pass_that_fails_and_is_repeated_leaves_the_same_states(
    engine_with: Callable[..., Engine],
    unshared: Engine,
    monkeypatch: pytest.MonkeyPatch,
    harm: str,
    place: str,
) -> None:
    engine, compute, calls = engine_with(prefill_chunk=98), RecurrentLayer._compute, 0  # it has no logits
    first, *_, last = states_of(engine).layers
    layer = first if place == "first" else last

    def failing(net: RecurrentLayer, recurrence: Any, records: torch.Tensor, *others: Any) -> None:
        nonlocal calls
        ends = 96 in recurrence.use.ends
        if ends and net.layer == layer:
            calls += 1
            if calls == 1 and harm == "NaN in company":
                records = records.fill_(torch.nan)
        compute(net, recurrence, records, *others)
        if ends and net.layer == layer and calls == 1 and harm == "no memory":
            raise RuntimeError(f"DefaultCPUAllocator: {NO_MEMORY[0]}")

    monkeypatch.setattr(RecurrentLayer, "_compute", failing)
    asked = of(LONG)
    sequence = start(engine, asked)
    if harm == "NaN in company":
        start(engine, of(range(3, 11), seed=4))
    run(engine)
    assert calls > 1
    monkeypatch.undo()
    kept = states_of(engine).kept
    at = kept.use(engine._cache._digest(sequence, 11))
    state, tail = state_after(unshared, [*LONG[:96]])
    assert are_equal(kept.all_states[:, at], state)
    assert are_equal(kept.all_tails[:, at], tail)
    assert Seen(engine).computed(of(LONG, seed=2)) == 4


def test_states_of_a_sequence_that_fails_are_never_kept(engine_with: Callable[..., Engine]) -> None:
    engine = engine_with()
    with torch.no_grad():
        model_of(engine).get_input_embeddings().weight[POISON] = torch.nan
    prompt = (*LONG[:20], POISON, *LONG[20:40])
    failing = engine.open(len(prompt), 1, Sampling(max_tokens=4))
    engine.submit(plain_decoding(failing.number, 0, prompt, 4))
    (failed,) = run(engine)
    assert isinstance(failed, Failed)
    kept = states_of(engine).kept
    assert not len(kept._place_of)
    assert len(kept._free) == 16
    assert len(plain(engine, of(LONG))) > 0


@pytest.mark.slow
def test_requests_with_common_beginnings_in_rounds_keep_their_texts(
    engine_with: Callable[..., Engine], unshared: Engine
) -> None:
    asked = [*requests(6), *requests(6)]
    texts = [plain(unshared, each) for each in asked]
    for settings in ({"max_sequences": 3, "prefill_chunk": 7}, {"cache_memory": 2**17, "prefill_chunk": 16}):
        engine = engine_with(**settings)
        for seed in range(2):
            answers, _ = in_rounds(engine, asked, texts, seed)
            assert answers == texts
        pool, kept = engine._cache.pool, states_of(engine).kept
        assert pool.available == pool.num_blocks
        assert len(kept._place_of) + len(kept._free) == kept.all_states.shape[1]
