"""Draft-ahead in the engine: what is prepared is what would be drafted, and it costs nobody anything."""

import random
from functools import cache

import pytest

from outrider.decoding.draft import MAX_NODES, ROOT, Draft
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO
from outrider.engine.loop.engine import Engine
from outrider.engine.sequence import EngineSequence
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Decode, Decoded, PreparedTree, Propose, Proposed
from outrider.pace.settings import MAX_DEPTH
from tests.support.demo_pair import prompt_of, text_of

DEPTH = 4


@cache
def engine(role: str, branches: int) -> Engine:
    settings = EngineSettings(
        model=str(DEMO / role), dtype="float32", threads=1, cache_memory=2**26, draft_ahead=branches
    )
    return Engine.from_settings(settings)


def run(engine: Engine) -> list:
    results = []
    while engine.has_work:
        results += engine.step()
    return results


def opened(engine: Engine, temperature: float) -> EngineSequence:
    prompt = prompt_of("code")
    sampling = Sampling(max_tokens=64, ignore_eos=True, temperature=temperature)
    return engine.open(len(prompt), noise_key(1, 0, prompt), sampling)


def drafted(
    engine: Engine, sequence: EngineSequence, base: int, tokens: tuple[int, ...], depth: int = DEPTH
) -> Proposed:
    """Until the Draft is there; nothing is prepared."""
    engine.submit(Propose(sequence.number, base, tokens, depth, base))
    while True:
        for result in engine.step():
            if isinstance(result, Proposed):
                return result


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("steps", [1, 3, 100])
def test_prepared_draft_equals_the_draft_made_later(temperature: float, steps: int) -> None:
    """Also where a Verdict comes after a few steps only; the text is the target's, word for word."""
    prompt = prompt_of("code")
    text = text_of(prompt, 48, temperature=temperature)
    ahead, plain = engine("draft", 12), engine("draft", 0)
    one, other = opened(ahead, temperature), opened(plain, temperature)
    base, tokens, committed = 0, prompt, 0
    hits = 0
    while committed < len(text) - DEPTH:
        proposed = drafted(ahead, one, base, tokens)
        assert proposed.draft == drafted(plain, other, base, tokens).draft
        hits += bool(proposed.ahead and proposed.ahead.tokens)
        for _ in range(steps):
            if ahead.has_work:
                ahead.step()
        base += len(tokens)
        rest = text[committed:]
        stood = next(i for i, token in enumerate((*proposed.draft.tokens, -1)) if token != rest[i])
        tokens = rest[: stood + 1]
        committed += len(tokens)
    assert hits > 5
    ahead.close(one)
    plain.close(other)
    assert not ahead.has_work


def fallen(rng: random.Random, sequence: EngineSequence, draft: Draft) -> tuple[int, ...]:
    """A Verdict's tokens: some of the Draft's, and one that is mostly a good guess for the target's own."""
    stood = rng.randrange(len(draft) + 1)
    path = sequence.pending.path_of(draft.tokens[:stood])
    known = sequence.draft.top_tokens.get(path[-1] if path else ROOT, ()) if len(path) == stood else ()
    rank = 0 if stood == len(draft) else rng.choice((1, 1, 2, 4))
    own = known[rank] if known and rng.random() < 0.9 else rng.randrange(5, 200)
    return (*draft.tokens[:stood], own)


@pytest.mark.parametrize(
    "branches", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 6, 20))]
)
def test_however_verdicts_fall_drafts_are_those_of_a_fresh_sequence(branches: int) -> None:
    """So are the guesses beside the chain, from which the next branches are made."""
    rng = random.Random(branches)
    ahead, plain = engine("draft", branches), engine("draft", 1)
    ranks_foreseen = set()
    for _ in range(6):
        sequence, tokens = opened(ahead, 1.0), prompt_of("code")
        text: tuple[int, ...] = ()
        while len(text) < len(prompt_of("code")) + 40:
            proposed = drafted(ahead, sequence, len(text), tokens)
            text += tokens
            fresh = opened(plain, 1.0)
            assert drafted(plain, fresh, 0, text).draft == proposed.draft
            for length in range(len(proposed.draft)):
                nodes = [
                    branched.pending.path_of(proposed.draft.tokens[:length]) for branched in (sequence, fresh)
                ]
                ours, theirs = (path[-1] if path else ROOT for path in nodes)
                assert sequence.draft.top_tokens[ours] == fresh.draft.top_tokens[theirs]
            plain.close(fresh)
            if proposed.ahead is not None and proposed.ahead.tokens:
                ranks_foreseen.add(proposed.ahead.rank)
            for _ in range(rng.choice((0, 2, 100, 100))):
                if ahead.has_work:
                    ahead.step()
            tokens = fallen(rng, sequence, proposed.draft)
        ahead.close(sequence)
    assert len(ranks_foreseen) >= min(branches, 3)


def test_foreseen_draft_needs_no_step() -> None:
    draft = engine("draft", 12)
    sequence = opened(draft, 0.0)
    prompt = prompt_of("code")
    proposed = drafted(draft, sequence, 0, prompt)
    (prepared,) = run(draft)
    assert isinstance(prepared, PreparedTree)
    assert prepared.draft.tokens[:DEPTH] == proposed.draft.tokens
    branch = next(
        prepared.draft.after((*proposed.draft.tokens, token))
        for node, token in enumerate(prepared.draft.tokens)
        if prepared.draft.parents[node] == DEPTH - 1
    )
    own = next(
        token for node, token in enumerate(prepared.draft.tokens) if prepared.draft.parents[node] == DEPTH - 1
    )
    draft.submit(Propose(sequence.number, len(prompt), (*proposed.draft.tokens, own), DEPTH, 1))
    (again,) = draft.step()
    assert isinstance(again, Proposed)
    assert again.draft == branch
    assert again.ahead is not None
    assert (again.ahead.tokens, again.ahead.rank) == (DEPTH, 0)
    assert again.ahead.saved > 0.0
    draft.close(sequence)


def test_nothing_is_prepared_while_drafts_are_only_compared_with_the_text() -> None:
    """More tokens than a Verdict has show that the target decodes freely; rounds are taken up again later."""
    draft = engine("draft", 12)
    prompt = prompt_of("code")
    text = text_of(prompt, 48, temperature=0.0)
    sequence = opened(draft, 0.0)
    drafted(draft, sequence, 0, prompt)
    proposed = drafted(draft, sequence, len(prompt), text[:20])
    assert not draft.has_work
    drafted(draft, sequence, len(prompt) + 20, (*proposed.draft.tokens[:1], 5))
    assert draft.has_work
    draft.close(sequence)


def test_waiting_draft_goes_before_preparing() -> None:
    draft = engine("draft", 12)
    first, second = opened(draft, 1.0), opened(draft, 1.0)
    drafted(draft, first, 0, prompt_of("code"))
    draft.step()  # prepares
    draft.submit(Propose(second.number, 0, prompt_of("code"), 2, 0))
    results = [*draft.step(), *draft.step()]
    assert [result.sequence for result in results if isinstance(result, Proposed)] == [second.number]
    assert not any(isinstance(result, PreparedTree) for result in results)
    draft.close(first)
    draft.close(second)


def test_preparing_ends_by_itself() -> None:
    """A step for every token of the next Draft, and one for the end of the Draft itself."""
    draft = engine("draft", 12)
    sequence = opened(draft, 1.0)
    drafted(draft, sequence, 0, prompt_of("code"))
    results, steps = [], 0
    while draft.has_work:
        results += draft.step()
        steps += 1
    assert [type(result) for result in results] == [PreparedTree]
    assert steps <= DEPTH + 1
    assert draft.step() == []
    draft.close(sequence)


def test_no_more_is_prepared_than_a_gateway_takes() -> None:
    prompt, many = prompt_of("code"), engine("draft", 200)
    sequence = opened(many, 1.0)
    many.submit(Propose(sequence.number, 0, prompt, MAX_DEPTH, 0, alternatives=MAX_DEPTH))
    (prepared,) = (result for result in run(many) if isinstance(result, PreparedTree))
    assert MAX_NODES // 4 < len(prepared.draft) <= MAX_NODES
    many.close(sequence)


def test_nothing_is_prepared_beyond_the_end_of_the_generation() -> None:
    draft = engine("draft", 12)
    prompt = prompt_of("code")
    sequence = draft.open(len(prompt), 1, Sampling(max_tokens=DEPTH + 1, ignore_eos=True))
    proposed = drafted(draft, sequence, 0, prompt)
    run(draft)
    assert len(proposed.draft) == DEPTH
    assert max(sequence.pending.depths) < DEPTH
    draft.close(sequence)


@pytest.mark.parametrize("steps", [0, 1, 3, 100])
def test_closing_leaves_nothing_of_what_was_prepared(steps: int) -> None:
    draft = engine("draft", 12)
    free = draft.load().free_blocks
    sequence = opened(draft, 1.0)
    drafted(draft, sequence, 0, prompt_of("code"))
    for _ in range(steps):
        if draft.has_work:
            draft.step()
    draft.close(sequence)
    assert not draft.has_work
    assert draft.load().free_blocks == free


def test_without_branches_nothing_is_prepared() -> None:
    draft = engine("draft", 0)
    sequence = opened(draft, 1.0)
    proposed = drafted(draft, sequence, 0, prompt_of("code"))
    assert not draft.has_work
    tokens = (*proposed.draft.tokens, 5)
    assert drafted(draft, sequence, len(prompt_of("code")), tokens).ahead is None
    assert not draft.has_work
    draft.close(sequence)


def test_new_draft_gets_fewer_branches_if_more_are_prepared() -> None:
    """Together they make steps too slow for those who wait; one verdict is prepared for in any case."""
    draft = engine("draft", 7)
    sequences = [opened(draft, 1.0) for _ in range(8)]
    for sequence in sequences:
        draft.submit(Propose(sequence.number, 0, prompt_of("code"), DEPTH, 0))
    results = run(draft)
    proposed = {result.sequence: result.draft for result in results if isinstance(result, Proposed)}
    prepared = {result.sequence: result.draft for result in results if isinstance(result, PreparedTree)}
    branches = [
        sum(parent < DEPTH <= node for node, parent in enumerate(prepared[sequence.number].parents))
        for sequence in sequences
    ]
    assert all(
        prepared[sequence.number].tokens[:DEPTH] == proposed[sequence.number].tokens for sequence in sequences
    )
    assert branches == [7, 3, 2, 1, 1, 1, 1, 1]
    for sequence in sequences:
        draft.close(sequence)


def test_target_continues_with_the_draft_of_a_foreseen_verdict() -> None:
    """The text is the same, and a Verdict that was not foreseen ends it."""
    target = engine("target", 0)
    prompt = prompt_of("code")
    text = text_of(prompt, 48, temperature=1.0)
    sequence = opened(target, 1.0)
    first, second = text[:4], text[5:9]
    tree = Draft.chain((*first, text[4], *second))
    target.submit(Decode(sequence.number, 0, prompt, Draft.chain(first), 1))
    target.submit(Decode(sequence.number, len(prompt), (), tree, 1))
    verdicts = run(target)
    assert all(isinstance(verdict, Decoded) for verdict in verdicts)
    assert [verdict.verdict.tokens for verdict in verdicts] == [text[:5], text[5:10]]
    target.submit(Decode(sequence.number, len(prompt), text[:10], Draft.chain((text[10] ^ 1,)), 2))
    target.submit(Decode(sequence.number, len(prompt) + 10, (), tree, 2))
    assert [verdict.verdict.tokens for verdict in run(target)] == [text[10:11]]
    target.close(sequence)


def test_tree_that_comes_after_its_verdict_is_continued_at_once() -> None:
    target = engine("target", 0)
    prompt = prompt_of("code")
    text = text_of(prompt, 16, temperature=1.0)
    sequence = opened(target, 1.0)
    target.submit(Decode(sequence.number, 0, prompt, Draft.chain(text[:2]), 1))
    run(target)
    target.submit(Decode(sequence.number, len(prompt), (), Draft.chain(text[:6]), 1))
    assert [verdict.verdict.tokens for verdict in run(target)] == [text[3:7]]
    target.close(sequence)


def test_continuation_of_a_draft_of_one_token_is_prepared() -> None:
    draft = engine("draft", 12)
    sequence = opened(draft, 1.0)
    proposed = drafted(draft, sequence, 0, prompt_of("code"), depth=1)
    (prepared,) = run(draft)
    assert isinstance(prepared, PreparedTree)
    assert len(prepared.draft.after(proposed.draft.tokens)) > 0
    draft.close(sequence)
