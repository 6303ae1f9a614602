"""The engine's contract: what it keeps, takes back, ends, reports and refuses."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decoding.choice_context import TokenLists
from outrider.decoding.draft import Draft, SparseProbs
from outrider.decoding.settings import Sampling
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.validation import check_sampling
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.sequence import EngineSequence
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Decode, Decoded, Propose, Proposed, plain_decoding
from outrider.pace.step import StepSize
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.engine_runs import run
from tests.support.functions import needs_functions

BLOCK = 4
COUNT = 24
GREEDY = Sampling(temperature=0, max_tokens=COUNT)
SEEDED = Sampling(temperature=1, max_tokens=COUNT, logprobs=3)
DRAWN_FROM_NOTHING = Draft.chain((5,), [SparseProbs((6,), (1.0,))])
PROMPT = tuple(random.Random(5).choices(range(3, VOCAB_SIZE), k=40))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    kinds = ("llama", "mistral", "gemma2")
    return {kind: write_checkpoint(tmp_path_factory.mktemp(kind), kind) for kind in kinds}


@pytest.fixture
def engine(folders: dict[str, Path]) -> Engine:
    return engine_of(folders["llama"])


def engine_of(folder: Path) -> Engine:
    return Engine.from_settings(
        EngineSettings(model=str(folder), block_size=BLOCK, cache_memory=2**22, prefill_chunk=16)
    )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"dtype": "float32"}, "exactly but for near-ties, in float32"),
        ({"dtype": "float16"}, "up to rounding, in float16: .*batch_invariant=true is refused here: dtype="),
        pytest.param(
            {"dtype": "bfloat16"},
            "up to rounding, in bfloat16: .*target.batch_invariant=true makes it exact",
            marks=needs_functions,
        ),
        pytest.param(
            {"dtype": "bfloat16", "batch_invariant": True},
            "exactly, in bfloat16 with batch-invariant",
            marks=needs_functions,
        ),
    ],
)
def test_engine_says_how_far_it_keeps_the_first_promise_as_its_plan_does(
    folders: dict[str, Path], settings: dict[str, Any], told: str
) -> None:
    asked = EngineSettings(model=str(folders["llama"]), cache_memory=2**22, **settings)
    engine = Engine.from_settings(asked)
    assert re.match(f"same seed, same text: {told}", engine.runner.promise.sentence)
    assert skeleton(asked).promise(asked) == engine.runner.promise


def plain(engine: Engine, sampling: Sampling, prompt: tuple[int, ...] = PROMPT) -> list[Decoded]:
    sequence = engine.open(len(prompt), 1, sampling)
    engine.submit(plain_decoding(sequence.number, 0, prompt, COUNT))
    results = [result for result in run(engine) if isinstance(result, Decoded)]
    engine.close(sequence)
    return results


def tokens_of(results: list[Decoded]) -> tuple[int, ...]:
    return tuple(result.verdict.tokens[-1] for result in results)


def verify(
    engine: Engine, sequence: EngineSequence, base: int, tokens: tuple[int, ...], draft: Draft
) -> Decoded:
    engine.submit(Decode(sequence.number, base, tokens, draft, round=base))
    (result,) = run(engine)
    assert isinstance(result, Decoded)
    return result


def test_settings_that_were_left_open_are_those_found(folders: dict[str, Path]) -> None:
    settings = EngineSettings(model=str(folders["llama"]), cache_memory=2**22)
    found = {
        "dtype": "float32",
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "prefill_chunk": 512,
    }
    assert Engine.from_settings(settings).settings == settings.model_copy(update=found)


@pytest.mark.parametrize("alternatives", [0, 6])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_model_that_drafts_for_itself_is_always_correct(
    folders: dict[str, Path], kind: str, alternatives: int
) -> None:
    """Every level of a tree attends to its own branch alone, within the window where there is one."""
    target, draft = engine_of(folders[kind]), engine_of(folders[kind])
    text = tokens_of(plain(target, SEEDED))
    verified, drafting = target.open(len(PROMPT), 1, SEEDED), draft.open(len(PROMPT), 1, SEEDED)
    emitted: tuple[int, ...] = ()
    base, tokens = 0, PROMPT
    while len(emitted) < COUNT:
        draft.submit(Propose(drafting.number, base, tokens, 5, 0, alternatives))
        (proposed,) = run(draft)
        assert isinstance(proposed, Proposed)
        verdict = verify(target, verified, base, tokens, proposed.draft).verdict
        assert len(verdict.accepted) == min(5, COUNT - len(emitted) - 1)
        base, tokens = base + len(tokens), verdict.tokens
        emitted += verdict.tokens
    assert emitted == text


def test_rolled_back_tokens_leave_shared_cache_as_it_was(engine: Engine) -> None:
    text = tokens_of(plain(engine, GREEDY))
    first, second = engine.open(len(PROMPT), 0, GREEDY), engine.open(len(PROMPT), 0, GREEDY)
    verify(engine, first, 0, PROMPT, Draft.chain(text[:8]))
    verify(engine, second, 0, PROMPT, Draft())  # shares the blocks of the prompt
    other = tuple((token + 1) % VOCAB_SIZE for token in PROMPT[20:])
    verify(engine, first, 20, other, Draft())  # goes back into them, and on with other tokens
    engine.submit(plain_decoding(second.number, len(second.tokens), (), COUNT, round=1))
    assert (text[0], *(r.verdict.tokens[-1] for r in run(engine) if isinstance(r, Decoded))) == text
    engine.close(first)
    engine.close(second)
    assert tokens_of(plain(engine, GREEDY)) == text


def test_drafted_tokens_that_turn_out_right_are_not_computed_again(engine: Engine) -> None:
    sequence = engine.open(len(PROMPT), 1, SEEDED)
    engine.submit(Propose(sequence.number, 0, PROMPT, 6, 0))
    (proposed,) = run(engine)
    assert isinstance(proposed, Proposed)
    engine.submit(Propose(sequence.number, len(PROMPT), (*proposed.draft.tokens[:4], 9), 1, 1))
    engine.step()
    assert engine.last_step is not None
    assert engine.last_step.tokens == 1


@pytest.mark.parametrize("count", [0, 1, 3])
def test_alternatives_may_be_asked_for_after_a_draft_without_any(engine: Engine, count: int) -> None:
    """And some of its tokens, or none, were committed since."""
    sequence = engine.open(len(PROMPT), 1, SEEDED)
    engine.submit(Propose(sequence.number, 0, PROMPT, 4, 0))
    (first,) = run(engine)
    assert isinstance(first, Proposed)
    engine.submit(Propose(sequence.number, len(PROMPT), first.draft.tokens[:count], 4, 1, alternatives=2))
    (second,) = run(engine)
    assert isinstance(second, Proposed)
    assert second.draft.path_of(first.draft.tokens[count:]) == tuple(range(4 - count))


def test_proposal_of_no_depth_fills_the_cache(engine: Engine) -> None:
    sequence = engine.open(len(PROMPT), 1, SEEDED)
    engine.submit(Propose(sequence.number, 0, PROMPT, 0, 3))
    (filled,) = run(engine)
    assert isinstance(filled, Proposed)
    assert (filled.round, len(filled.draft)) == (3, 0)
    engine.submit(Propose(sequence.number, len(PROMPT), (9,), 1, 4))
    engine.step()
    assert engine.last_step is not None
    assert engine.last_step.tokens == 1


def test_lease_that_crosses_the_last_tokens_continues_after_them(engine: Engine) -> None:
    text = tokens_of(plain(engine, GREEDY))
    sequence = engine.open(len(PROMPT), 1, GREEDY)
    engine.submit(plain_decoding(sequence.number, 0, PROMPT, 8))
    first = run(engine)
    # The sender has seen three of the eight.
    engine.submit(plain_decoding(sequence.number, len(PROMPT), text[:3], 10))
    assert tuple(r.verdict.tokens[-1] for r in first + run(engine) if isinstance(r, Decoded)) == text[:13]


def test_lease_that_is_shorter_than_the_lease_in_force_changes_nothing(engine: Engine) -> None:
    sequence = engine.open(len(PROMPT), 1, GREEDY)
    engine.submit(plain_decoding(sequence.number, 0, PROMPT, 8))
    engine.submit(plain_decoding(sequence.number, 0, PROMPT, 3))
    assert len(run(engine)) == 8
    engine.submit(plain_decoding(sequence.number, 0, PROMPT, 3))
    assert not engine.has_work


def decoding(engine: Engine, sampling: Sampling) -> EngineSequence:
    """One that has decoded three tokens freely and goes on."""
    sequence = engine.open(len(PROMPT), 1, sampling)
    engine.submit(plain_decoding(sequence.number, 0, PROMPT, COUNT))
    while len(sequence.tokens) < len(PROMPT) + 3:
        engine.step()
    return sequence


@pytest.mark.parametrize("wrong", [None, 1, 3], ids=str)
def test_tokens_that_the_sender_of_a_draft_had_not_seen_stand(engine: Engine, wrong: int | None) -> None:
    """The Draft is judged as far as it follows them. wrong: its token that is."""
    text = tokens_of(plain(engine, SEEDED))
    sequence = decoding(engine, SEEDED)
    drafted = [token ^ (place == wrong) for place, token in enumerate(text[1:6])]
    engine.submit(Decode(sequence.number, len(PROMPT), text[:1], Draft.chain(drafted), round=1))
    (verified,) = run(engine)
    assert isinstance(verified, Decoded)
    stands = {None: 3, 1: 0, 3: 1}[wrong]
    assert verified.verdict.accepted == tuple(range(stands))
    assert verified.verdict.tokens == text[3 : 4 + stands]
    assert engine.last_step is not None
    assert engine.last_step.tokens == 1 + (0 if wrong == 1 else 3)


def test_draft_for_an_ended_generation_is_not_judged(engine: Engine) -> None:
    text = tokens_of(plain(engine, GREEDY))
    sequence = engine.open(len(PROMPT), 1, GREEDY)
    engine.submit(plain_decoding(sequence.number, 0, PROMPT, COUNT))
    run(engine)
    engine.submit(Decode(sequence.number, len(PROMPT), text[:4], Draft.chain(text[4:6]), round=1))
    assert not engine.has_work


def test_rejection_or_block_may_accept_other_tokens_than_those_that_were_decoded(engine: Engine) -> None:
    sampling = SEEDED.model_copy(update={"verification": "rejection", "logprobs": None})
    text = tokens_of(plain(engine, sampling))
    sequence = decoding(engine, sampling)
    other = text[1] ^ 1
    guess = Draft.chain((other,), [SparseProbs((other,), (1.0,))])
    verified = verify(engine, sequence, len(PROMPT), text[:1], guess)
    assert sequence.tokens == [*PROMPT, text[0], *verified.verdict.tokens]


def test_generation_ends_at_a_stop_token_inside_an_accepted_draft(engine: Engine) -> None:
    text = tokens_of(plain(engine, GREEDY))
    place = next(i for i in range(2, COUNT) if text[i] not in text[:i])
    stopping = GREEDY.model_copy(update={"stop_token_ids": (text[place],)})
    sequence = engine.open(len(PROMPT), 1, stopping)
    result = verify(engine, sequence, 0, PROMPT, Draft.chain(text[: place + 3]))
    assert (result.verdict.tokens, result.finish) == (text[: place + 1], "stop")
    assert [r.finish for r in plain(engine, stopping)] == [None] * place + ["stop"]


def test_generation_ends_at_max_tokens_inside_a_longer_draft(engine: Engine) -> None:
    text = tokens_of(plain(engine, GREEDY))
    sequence = engine.open(len(PROMPT), 1, GREEDY.model_copy(update={"max_tokens": 3}))
    result = verify(engine, sequence, 0, PROMPT, Draft.chain(text[:8]))
    assert (result.verdict.tokens, result.finish) == (text[:3], "length")


def test_log_probabilities_are_those_of_plain_decoding(engine: Engine) -> None:
    reference = plain(engine, SEEDED)
    sequence = engine.open(len(PROMPT), 1, SEEDED)
    result = verify(engine, sequence, 0, PROMPT, Draft.chain(tokens_of(reference)[:6]))
    assert len(result.logprobs) == len(result.verdict.tokens) == 7
    for ours, theirs in zip(result.logprobs, reference, strict=False):
        assert ours.chosen == pytest.approx(theirs.logprobs[0].chosen, abs=1e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.logprobs[0].top]


def test_timings_add_up_and_name_the_batch(engine: Engine) -> None:
    sequence = engine.open(len(PROMPT), 1, GREEDY)
    timings = verify(engine, sequence, 0, PROMPT, Draft.chain((5, 6))).timings
    assert 0 < timings.forward < timings.total
    assert timings.queue + timings.forward <= timings.total
    assert 0 < timings.last_step.seconds <= timings.step <= timings.total
    # The last chunk of the prompt, and the Draft.
    assert timings.last_step.size == StepSize(
        1, tokens=2, prompt_tokens=len(PROMPT) % 16, context_tokens=len(PROMPT)
    )


def test_draft_after_a_pause_equals_the_draft_without_a_pause(engine: Engine) -> None:
    """A cache that fell behind catches up in chunks as small as those of prompts, and guesses as well."""
    text = tokens_of(plain(engine, SEEDED))
    followed, paused = (engine.open(len(PROMPT), 1, SEEDED) for _ in range(2))

    def proposed(
        sequence: EngineSequence, base: int, tokens: tuple[int, ...], depth: int
    ) -> tuple[Draft, int]:
        engine.submit(Propose(sequence.number, base, tokens, depth, 0))
        results, largest = [], 0
        while engine.has_work:
            results += engine.step()
            assert engine.last_step is not None
            largest = max(largest, engine.last_step.tokens)
        (result,) = results
        assert isinstance(result, Proposed)
        return result.draft, largest

    proposed(followed, 0, PROMPT, 4)
    proposed(paused, 0, PROMPT, 0)
    for end in range(1, 19):
        draft, _ = proposed(followed, len(PROMPT) + end - 1, text[end - 1 : end], 4)
    after_pause, largest = proposed(paused, len(PROMPT), text[:18], 4)
    assert after_pause == draft == Draft.chain(text[18:22])
    assert largest <= 16


def test_drafted_token_outside_the_vocabulary_is_refused(engine: Engine) -> None:
    text = tokens_of(plain(engine, GREEDY))
    sequence = engine.open(len(PROMPT), 1, GREEDY)
    result = verify(engine, sequence, 0, PROMPT, Draft.chain((text[0], VOCAB_SIZE + 7, text[2])))
    assert result.verdict.tokens == text[:2]


def test_closing_voids_the_work_and_may_be_repeated(engine: Engine) -> None:
    free = engine.load().free_blocks
    sequence = engine.open(len(PROMPT), 1, GREEDY)
    engine.submit(plain_decoding(sequence.number, 0, PROMPT, COUNT))
    engine.step()
    engine.close(sequence)
    engine.close(sequence)
    assert not engine.has_work
    assert engine.load().free_blocks == free


@pytest.mark.parametrize(
    ("base", "tokens", "draft", "verification", "message"),
    [
        (1, PROMPT, Draft(), "coupled", "base=1 must be 0 to 0"),
        (0, PROMPT[:3], Draft(), "coupled", "must cover the prompt of 40"),
        (
            0,
            (*PROMPT, VOCAB_SIZE),
            Draft(),
            "coupled",
            f"token id {VOCAB_SIZE} must be 0 to {VOCAB_SIZE - 1}",
        ),
        (0, (*PROMPT, *range(COUNT)), Draft(), "coupled", "must be below 64"),
        (0, PROMPT, Draft.chain((5,)), "rejection", "needs a chain with draft_probs"),
        (0, PROMPT, Draft((5, 6), (-1, -1)), "block", "needs a chain with draft_probs"),
        (0, PROMPT, DRAWN_FROM_NOTHING, "block", "token 5 must be in the support"),
    ],
)
def test_work_that_contradicts_its_sequence_is_refused(
    engine: Engine, base: int, tokens: tuple[int, ...], draft: Draft, verification: str, message: str
) -> None:
    sampling = Sampling.model_validate({"max_tokens": COUNT, "verification": verification})
    sequence = engine.open(len(PROMPT), 1, sampling)
    with pytest.raises(ValueError, match=message):
        engine.submit(Decode(sequence.number, base, tokens, draft, round=base))
    assert not engine.has_work


def test_work_for_a_closed_sequence_is_refused(engine: Engine) -> None:
    sequence = engine.open(len(PROMPT), 1, GREEDY)
    engine.close(sequence)
    with pytest.raises(ValueError, match="is closed"):
        engine.submit(plain_decoding(sequence.number, 0, PROMPT, 1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias: token id 256"),
        ({"stop_token_ids": (999,)}, "stop_token_ids: token id 999"),
        ({"bad_token_ids": tuple(range(VOCAB_SIZE))}, "leave no token"),
        ({"allowed_token_ids": (7,), "stop_token_ids": (7,), "min_tokens": 2}, "leave no token"),
    ],
)
def test_sampling_settings_that_do_not_suit_the_vocabulary_are_refused(
    engine: Engine, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.open(len(PROMPT), 1, Sampling.model_validate(settings))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_draft_does_not_read_a_prompt_beyond_its_context(tmp_path: Path, kind: str) -> None:
    """Some models have no position there, others would compute it in vain."""
    engine = engine_of(write_checkpoint(tmp_path, kind, n_positions=32, max_position_embeddings=32))
    sequence = engine.open(len(PROMPT), 1, GREEDY)
    for depth in (0, 4):
        engine.submit(Propose(sequence.number, 0, PROMPT, 0, depth))
        (result,) = run(engine)
        assert isinstance(result, Proposed)
        assert len(result.draft) == 0
    assert sequence.cached == 0


def test_check_of_sampling_never_lists_the_vocabulary() -> None:
    """Time for a vocabulary of any size, and for lists that are as long."""
    many = tuple(range(10_000))
    check_sampling(Sampling(bad_token_ids=many, min_tokens=1), 10**15, range(10_000))
    with pytest.raises(ValueError, match="leave no token"):
        check_sampling(Sampling(bad_token_ids=many[:9_999], min_tokens=1), 10_000, (9_999,))


def test_token_lists_are_read_once_per_sequence(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for every row of every step: all others in it would wait."""
    read, of = [], TokenLists.of

    def counted(*given: Any) -> TokenLists:
        read.append(given)
        return of(*given)

    monkeypatch.setattr(TokenLists, "of", counted)
    sampling = GREEDY.model_copy(update={"allowed_token_ids": tuple(range(3, VOCAB_SIZE))})
    assert plain(engine, sampling)
    assert len(read) == 1
