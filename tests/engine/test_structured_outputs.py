"""Answers under a grammar: valid, and the same whatever drafts, in whatever company, after whatever loss."""

import json
import threading
import time
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from outrider.decoding.draft import ROOT, Draft
from outrider.decoding.grammar import GrammarError, compiled
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO
from outrider.drafters.ngram import NgramIndex
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.loop import grammars
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.index import IndexDrafter
from outrider.engine.offline.speculate import OfflineRequest, Output, generate
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Decode, Decoded, Failed, Propose, Proposed, plain_decoding
from tests.support.grammars import (
    ENDS,
    GRAMMARS,
    THINKING,
    ids,
    json_grammar,
    lark_grammar,
    regex_grammar,
    tokenizer,
    tokens,
)

PROMPT = tuple(ids("Somebody as JSON: "))
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2},
    {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.1},
)


@cache
def engine(role: str, branches: int = 0) -> Engine:
    settings = EngineSettings(
        model=str(DEMO / role),
        dtype="float32",
        threads=1,
        cache_memory=2**26,
        self_check=False,
        draft_ahead=branches,
    )
    return Engine.from_settings(settings)


def request(grammar: str, seed: int = 0, max_tokens: int = 40, **asked) -> OfflineRequest:
    sampling = Sampling(max_tokens=max_tokens, grammar=grammar, **asked)
    return OfflineRequest(PROMPT, sampling, noise_key(seed, 0, PROMPT))


def requests() -> list[OfflineRequest]:
    names = ("person", "person", "recursive", "spaces", "unicode", "regex", "thinking", "object")
    return [request(GRAMMARS[name], seed, **ASKED[seed % len(ASKED)]) for seed, name in enumerate(names)]


def text(output: Output) -> str:
    return tokenizer().decode(list(output.tokens))


@cache
def plain() -> list[Output]:
    """Each alone, without a Draft."""
    return [generate(engine("target"), None, [request], 0)[0] for request in requests()]


DRAFTERS = {
    "nothing, in a batch": (lambda: None, 0, 0),
    "n-grams": (lambda: IndexDrafter(NgramIndex), 5, 0),
    "a model": (lambda: DraftModel(engine("draft")), 4, 0),
    "a model, with leaves": (lambda: DraftModel(engine("draft")), 3, 5),
    "a model that drafts ahead": (lambda: DraftModel(engine("draft", 12)), 3, 2),
}


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("name", DRAFTERS)
def test_grammar_gives_equal_text_with_any_drafter(name: str) -> None:
    drafter, depth, alternatives = DRAFTERS[name]
    answers = generate(engine("target"), drafter(), requests(), depth, alternatives)
    assert [text(answer) for answer in answers] == [text(answer) for answer in plain()]
    assert [answer.finish for answer in answers] == [answer.finish for answer in plain()]


def test_ended_answer_is_valid_and_cut_answer_begins_a_valid_text() -> None:
    answers = plain()
    assert sum(answer.finish == "stop" for answer in answers) >= 4
    for asked, answer in zip(requests(), answers, strict=True):
        assert asked.sampling.grammar is not None
        follows = compiled(asked.sampling.grammar, tokens())
        content = [token for token in answer.tokens if token not in ENDS]
        assert follows.try_consume_tokens(content) == len(content)
        assert follows.is_accepting() or answer.finish == "length"
    assert [*json.loads(text(answers[0]))] == ["name", "age", "tags"]


def test_forced_tokens_save_passes_of_the_target_without_a_drafter() -> None:
    answer = plain()[0]
    assert answer.target_passes < 0.75 * len(answer.tokens)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_under_rejection_or_block_every_token_follows_the_grammar_too(rule: str) -> None:
    asked = [request(GRAMMARS["person"], seed, temperature=1.0, verification=rule) for seed in range(4)]
    for drafter in (DraftModel(engine("draft")), IndexDrafter(NgramIndex)):
        for answer in generate(engine("target"), drafter, asked, 3):
            if answer.finish == "stop":
                assert [*json.loads(text(answer))] == ["name", "age", "tags"]
            assert text(answer).startswith('{"name": "')


def test_token_of_the_target_after_a_whole_draft_follows_the_grammar() -> None:
    """The bonus row: after a Draft that stands as a whole nothing else could stop a wrong token."""
    target = engine("target")
    expected = generate(target, None, [request(GRAMMARS["person"], 1, temperature=1.2)], 0)[0].tokens
    for length in range(1, len(expected) - 1):
        sequence = open_sequence(target, GRAMMARS["person"], 1, temperature=1.2)
        target.submit(Decode(sequence, 0, PROMPT, Draft.chain(expected[:length]), 1))
        (result,) = run(target)
        assert isinstance(result, Decoded)
        assert len(result.verdict.accepted) == length
        assert result.verdict.tokens == expected[: len(result.verdict.tokens)]
        target.close(target.sequence(sequence))


def test_thought_may_end_anywhere_inside_a_draft() -> None:
    target, thought = engine("target"), ids("so it is</think>")
    after = {tokenizer().token_to_id("{"), tokenizer().token_to_id('{"')}
    ended = 0
    for cut in range(1, len(thought)):
        sequence = open_sequence(target, THINKING, 2, temperature=1.0)
        committed = (*PROMPT, *thought[:cut])
        wrong = ids(" the cat")
        target.submit(Decode(sequence, 0, committed, Draft.chain([*thought[cut:], *wrong]), 1))
        (result,) = run(target)
        assert isinstance(result, Decoded)
        said = [*thought[:cut], *result.verdict.tokens]
        if said[: len(thought)] == thought and len(said) > len(thought):
            assert said[len(thought)] in after
            ended += 1
        target.close(target.sequence(sequence))
    assert ended > 2


def test_nothing_is_asked_of_a_grammar_after_the_end() -> None:
    """Drafted tokens may follow an end of sequence, or a stop token: the answer ends there; nobody fails."""
    target, end = engine("target"), min(ENDS)
    for stop in ({}, {"stop_token_ids": (ids("ab")[0],)}):
        grammar = regex_grammar("[abc]{2}")
        sequence = open_sequence(target, grammar, 3, temperature=1.0, **stop)
        first = ids("ab")[0]
        draft = Draft((first, end, end, first, first), (ROOT, 0, ROOT, 1, 2))
        target.submit(Decode(sequence, 0, PROMPT, draft, 1))
        (result,) = run(target)
        assert isinstance(result, Decoded)
        said = [*result.verdict.tokens]
        while result.finish is None:
            base = len(target.sequence(sequence).tokens)
            target.submit(plain_decoding(sequence, base, (), 4))
            for result in run(target):
                assert isinstance(result, Decoded)
                said += result.verdict.tokens
        assert said[-1] in ENDS or stop
        target.close(target.sequence(sequence))


def test_completed_grammar_ends_the_answer_even_before_min_tokens() -> None:
    answers = generate(engine("target"), None, [request(regex_grammar("yes|no"), min_tokens=20)], 0)
    assert answers[0].finish == "stop"
    assert text(answers[0]) in ("yes", "no")


DIGITS = tuple(ids(digit)[0] for digit in "0123456789")
CONTRADICTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "banned": ("[0-9]{3}", {"bad_token_ids": DIGITS}, ""),
    "not allowed": ("[0-9]{3}", {"allowed_token_ids": (300,)}, ""),
    "after the beginning": ("[0-9][a-z]", {"allowed_token_ids": DIGITS}, "4"),
}


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_answer_whose_token_lists_contradict_its_form_fails(case: str, drafted: bool) -> None:
    target = engine("target")
    regex, lists, begin = CONTRADICTIONS[case]
    sequence = open_sequence(target, regex_grammar(regex), 0, temperature=0.0, **lists)
    if drafted:
        target.submit(Decode(sequence, 0, PROMPT, Draft(tuple(ids(begin)), (ROOT,) * len(begin)), 1))
    else:
        target.submit(plain_decoding(sequence, 0, PROMPT, 10))
    results = run(target)
    while not isinstance(results[-1], Failed):
        assert results[-1].finish is None, results
        target.submit(plain_decoding(sequence, len(target.sequence(sequence).tokens), (), 10))
        results += run(target)
    assert "leave no token that the form of the answer allows" in results[-1].reason


def test_draft_that_leads_to_a_dead_end_is_cut_before_it() -> None:
    target = engine("target")
    grammar = regex_grammar("[0-9][a-z]")
    sequence = open_sequence(target, grammar, 0, temperature=0.0, allowed_token_ids=DIGITS)
    target.submit(plain_decoding(sequence, 0, PROMPT, 1))
    (first,) = run(target)
    target.close(target.sequence(sequence))
    sequence = open_sequence(target, grammar, 0, temperature=0.0, allowed_token_ids=DIGITS)
    target.submit(Decode(sequence, 0, PROMPT, Draft(first.verdict.tokens, (ROOT,)), 1))
    (result,) = run(target)
    assert (result.verdict.tokens, result.finish) == (first.verdict.tokens, None)
    target.close(target.sequence(sequence))


def test_complete_answer_may_end_though_no_listed_token_is_an_end() -> None:
    answers = generate(
        engine("target"), None, [request(regex_grammar("[0-9]{3}"), allowed_token_ids=DIGITS)], 0
    )
    assert answers[0].finish == "stop"
    assert len(text(answers[0])) == 3


def test_reopened_sequence_continues_its_grammar() -> None:
    target, grammar = engine("target"), GRAMMARS["person"]
    expected = generate(target, None, [request(grammar, 1, temperature=0.8)], 0)[0].tokens
    for length in range(len(expected) - 1):
        sequence = open_sequence(target, grammar, 1, temperature=0.8)
        target.submit(plain_decoding(sequence, 0, (*PROMPT, *expected[:length]), 40 - length))
        rest = [token for result in run(target) for token in result.verdict.tokens]  # type: ignore[union-attr]
        assert (*expected[:length], *rest) == expected
        target.close(target.sequence(sequence))


def test_draft_guesses_only_tokens_of_its_grammar() -> None:
    draft = engine("draft")
    for asked in ASKED:
        sequence = open_sequence(draft, GRAMMARS["person"], 0, **asked)
        draft.submit(Propose(sequence, 0, PROMPT, 8, 1))
        (result,) = run(draft)
        assert isinstance(result, Proposed)
        follows = compiled(GRAMMARS["person"], tokens())
        assert len(result.draft) == 8
        assert follows.try_consume_tokens([*result.draft.tokens]) == 8
        draft.close(draft.sequence(sequence))


def test_draft_takes_no_step_for_tokens_that_its_grammar_forces() -> None:
    draft = engine("draft")
    sequence = open_sequence(draft, GRAMMARS["person"], 0)
    draft.submit(Propose(sequence, 0, PROMPT, 8, 1))
    steps, found = 0, list[Any]()
    while not found:
        found += draft.step()
        steps += draft.sequence(sequence).cached > 0
    assert len(found[0].draft) == 8
    assert steps <= 6  # among the tokens at least {"name": " are forced
    draft.close(draft.sequence(sequence))


def test_prepared_branch_is_forced_free_and_correct() -> None:
    """Trees that are made ahead hold nothing that the grammar refuses."""
    draft = engine("draft", 12)
    for seed in range(4):
        sequence = open_sequence(draft, GRAMMARS["person"], seed, temperature=1.2)
        draft.submit(Propose(sequence, 0, PROMPT, 3, 1))
        results = run(draft)
        tree = results[-1].draft
        for node in range(len(tree)):
            follows = compiled(GRAMMARS["person"], tokens())
            path = [tree.tokens[above] for above in tree.path(node)]
            assert follows.try_consume_tokens(path) == len(path), path
        draft.close(draft.sequence(sequence))


def test_draft_without_the_tokens_of_its_grammar_only_guesses_badly() -> None:
    """A draft with fewer tokens than its target would have an empty row."""
    draft = engine("draft")
    few = tuple(range(100, 120))
    sequence = open_sequence(draft, GRAMMARS["person"], 0, allowed_token_ids=few)
    draft.submit(Propose(sequence, 0, PROMPT, 4, 1))
    assert [type(result) for result in run(draft)] == [Proposed]
    draft.close(draft.sequence(sequence))


def test_others_go_on_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    def slowly(grammar: str, tokens: LLTokenizer) -> LLMatcher:
        may_end.wait(30)
        return compiled(grammar, tokens)

    monkeypatch.setattr(grammars, "compiled", slowly)
    target = engine("target")
    waiting = open_sequence(target, regex_grammar("slow{1,3}"), 0)
    target.submit(plain_decoding(waiting, 0, PROMPT, 4))
    other = target.open(len(PROMPT), 1, Sampling(max_tokens=4, ignore_eos=True)).number
    target.submit(plain_decoding(other, 0, PROMPT, 4))
    done = [result.sequence for result in run(target, results=4)]
    assert done == [other] * 4
    assert target.step() == []
    may_end.set()
    results = run(target)
    assert {result.sequence for result in results} == {waiting}
    for number in (waiting, other):
        target.close(target.sequence(number))


def test_uncompilable_grammar_fails_its_own_sequence_alone() -> None:
    target = engine("target")
    bad = open_sequence(target, lark_grammar("start: thing"), 0)
    target.submit(plain_decoding(bad, 0, PROMPT, 4))
    (result,) = run(target)
    assert isinstance(result, Failed)
    assert 'unknown name: "thing"' in result.reason
    with pytest.raises(KeyError):
        target.sequence(bad)


def test_committed_tokens_that_contradict_the_grammar_fail_their_own_sequence_alone() -> None:
    target = engine("target")
    wrong = open_sequence(target, GRAMMARS["person"], 0)
    other = open_sequence(target, GRAMMARS["person"], 1)
    target.submit(Decode(wrong, 0, (*PROMPT, ids("cat")[0]), Draft(), 1))
    target.submit(Decode(other, 0, PROMPT, Draft(), 1))
    kinds = {result.sequence: type(result) for result in run(target)}
    assert kinds == {wrong: Failed, other: Decoded}
    target.close(target.sequence(other))


def test_grammar_is_compiled_once_for_all_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counted(grammar: str, tokens: LLTokenizer) -> LLMatcher:
        asked.append(grammar)
        return compiled(grammar, tokens)

    monkeypatch.setattr(grammars, "compiled", counted)
    grammar = json_grammar({"const": "once"})
    generate(engine("target"), None, [request(grammar, seed) for seed in range(3)], 0)
    generate(engine("target"), None, [request(grammar)], 0)
    assert asked == [grammar]


def test_ignore_eos_and_a_grammar_exclude_each_other() -> None:
    with pytest.raises(GrammarError, match="end of sequence"):
        open_sequence(engine("target"), GRAMMARS["person"], 0, ignore_eos=True)


def open_sequence(engine: Engine, grammar: str, seed: int, **asked) -> int:
    sampling = Sampling(max_tokens=40, grammar=grammar, **asked)
    return engine.open(len(PROMPT), noise_key(seed, 0, PROMPT), sampling).number


def run(engine: Engine, results: int | None = None) -> list[Any]:
    """Steps until there is no more work, or so many results."""
    found: list[Any] = []
    deadline = time.monotonic() + 60
    while engine.has_work and (results is None or len(found) < results):
        found += engine.step()
        assert time.monotonic() < deadline
    return found
