"""Grammars as masks: a position's depends on the tokens before it alone, however one came there."""

import json
import random
import re
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from gateway.generation.form import choice
from outrider.decoding.draft import ROOT, Draft, SparseProbs
from outrider.decoding.grammar import MAX_FORCED, MAX_GRAMMAR, GrammarError, Mask, allows, compiled
from outrider.decoding.verify import sample_draft_token, verify_block, verify_rejection
from tests.support.grammars import (
    ENDS,
    GRAMMARS,
    PERSON,
    THINKING,
    ids,
    json_grammar,
    lark_grammar,
    matcher,
    regex_grammar,
    tokenizer,
    tokens,
)

WORDS = 64  # words of a mask over 2048 tokens


def allowed(mask: Mask) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def straight(grammar: str, path: list[int]) -> Mask | None:
    """What may follow the path, by a matcher of the library that went this way and no other."""
    fresh = compiled(grammar, tokens())
    if ENDS & {*path} or fresh.try_consume_tokens(path) != len(path):
        return None
    return np.frombuffer(fresh.compute_bitmask(), np.int32)[:WORDS]


def drawn(grammar: str, generated: list[int], draw: random.Random) -> Draft:
    """A tree whose tokens the grammar mostly allows."""
    draft = Draft()
    for _ in range(draw.randrange(8)):
        parent = draw.randrange(ROOT, len(draft))
        path = [draft.tokens[node] for node in draft.path(parent)]
        mask = straight(grammar, generated + path)
        is_wild = mask is None or draw.random() < 0.2
        token = draw.randrange(2048) if is_wild else draw.choice(allowed(mask))  # type: ignore[arg-type]
        if draft.child(parent, token) is None:
            draft = Draft((*draft.tokens, token), (*draft.parents, parent))
    return draft


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("name", GRAMMARS)
def test_mask_is_the_same_whatever_was_looked_at_before(name: str) -> None:
    grammar, draw = GRAMMARS[name], random.Random(name)
    for _ in range(4):
        wandering, generated = matcher(grammar), list[int]()
        for _ in range(16):
            seen = wandering.constrained(generated, drawn(grammar, generated, draw), room=40)
            nodes = range(ROOT, len(seen.draft))
            masks = wandering.masks(generated, seen.draft, nodes)
            for node, mask in zip(nodes, masks, strict=True):
                path = [seen.draft.tokens[above] for above in seen.draft.path(node)]
                expected = straight(grammar, generated + path)
                assert (mask is None) == (expected is None)
                assert mask is None or np.array_equal(mask, expected)  # type: ignore[arg-type]
                if node >= len(seen.kept):
                    assert allowed(straight(grammar, generated + path[:-1])) == [path[-1]]  # type: ignore[arg-type]
            assert masks[0] is not None
            token = draw.choice(allowed(masks[0]))
            if token in ENDS:
                break
            generated.append(token)
            if draw.random() < 0.1:  # a worker that is behind the gateway, or ahead of it
                del generated[draw.randrange(len(generated)) :]


def test_masks_after_another_branch_are_those_of_the_branch_alone() -> None:
    """A string in a list may be followed by what a key may not."""
    grammar = json_grammar({"type": "object"})
    generated = [*ids('{"'), *ids("colours"), *ids('":')]
    (in_list,), (key,) = ids(' ["'), ids(' {"')
    draft = Draft((in_list, key), (ROOT, ROOT))
    found = matcher(grammar).masks(generated, draft, [0, 1])
    for mask, node in zip(found, draft.tokens, strict=True):
        assert mask is not None
        assert allowed(mask) == allowed(straight(grammar, [*generated, node]))  # type: ignore[arg-type]


def test_constrained_drops_refused_tokens_and_their_successors() -> None:
    right, wrong = ids('{"name'), ids(" cat")[0]
    draft = Draft((*right, wrong, right[0], right[0]), (ROOT, 0, ROOT, 1, 2))
    seen = matcher(GRAMMARS["person"]).constrained([], draft, room=len(draft))
    assert seen.kept == (0, 1)
    assert seen.forced == (0, 1)
    assert seen.draft.tokens[:2] == tuple(right)


def test_forced_text_follows_the_chain_as_the_tokenizer_writes_it() -> None:
    grammar = json_grammar({"const": {"temperature": 20, "unit": "degrees"}})
    whole = ids('{"temperature": 20, "unit": "degrees"}')
    seen = matcher(grammar).constrained([], Draft(), room=100)
    assert seen.draft.is_chain
    assert [*seen.draft.tokens] == whole[: len(seen.draft)]
    assert MAX_FORCED >= len(seen.draft) > 5
    later = matcher(grammar).constrained(whole[:2], Draft.chain(whole[2:4]), room=4)
    assert [*later.draft.tokens] == whole[2:6]
    assert (later.kept, later.forced) == ((0, 1), (0, 1))


def test_constrained_forces_no_more_than_its_room() -> None:
    grammar = json_grammar({"const": "a long text that leaves nothing open"})
    assert [len(matcher(grammar).constrained([], Draft(), room).draft) for room in (-1, 0, 1, 3)] == [
        0,
        0,
        1,
        3,
    ]


@pytest.mark.parametrize(("mask_s", "nodes"), [(0.0, 10), (1e-4, 10), (0.002, 5), (0.02, 0)])
def test_draft_whose_masks_take_long_is_cut(
    monkeypatch: pytest.MonkeyPatch, mask_s: float, nodes: int
) -> None:
    clock = iter([0.0, mask_s])
    answer, chain = matcher(regex_grammar("[a-z ]*")), Draft.chain(ids("cat")[:1] * 10)
    with monkeypatch.context() as patched:
        patched.setattr(time, "thread_time", lambda: next(clock))
        answer.masks([], Draft(), [ROOT])
    assert len(answer.constrained([], chain, room=20).kept) == nodes


def test_forced_text_with_other_spellings_is_not_forced() -> None:
    grammar = regex_grammar("(foo|bar)")
    free = ids("foo")[0]
    assert matcher(grammar).constrained([], Draft.chain([free]), room=9).forced == ()


def test_constrained_with_draft_probs_makes_forced_tokens_certain() -> None:
    grammar = json_grammar({"const": {"value": 7}})
    first = ids('{"value": 7}')[0]
    chain = Draft.chain([first], [SparseProbs((first, 9), (0.5, 0.5))])
    seen = matcher(grammar).constrained([], chain, room=9, has_probs=True)
    assert len(seen.draft.draft_probs) == len(seen.draft) > 1
    assert all(probs.probs == (1.0,) for probs in seen.draft.draft_probs[1:])


def test_answer_ends_where_its_grammar_lets_it_and_nothing_is_asked_after_that() -> None:
    answer = matcher(regex_grammar("[ab]{1,2}"))
    token, (end, _) = ids("a")[0], sorted(ENDS)
    seen = answer.constrained([token], Draft((end, token, token), (ROOT, 0, ROOT)), room=9)
    assert seen.kept == (0, 2)  # an end may follow; nothing may follow an end
    after_end, after_both = answer.masks([token], seen.draft, [0, 1])
    assert after_end is None
    assert after_both is not None
    assert allowed(after_both) == sorted(ENDS)
    begin, only = answer.masks([], Draft(), [ROOT])[0], answer.masks([token, token], Draft(), [ROOT])[0]
    assert begin is not None
    assert only is not None
    assert not allows(begin, end)
    assert allowed(only) == sorted(ENDS)


MARKS = "a <tool_call><|end|><<tool_call>>é</tool_call"


@pytest.mark.parametrize(
    "grammar",
    [
        lark_grammar(f"start: {json.dumps(MARKS)}"),
        lark_grammar('start: "a <tool" "_call><|end|><<tool_call>>é" /<[\\/]tool_call/'),
        choice([MARKS, "b"], "").grammar(),
        regex_grammar(f"{re.escape(MARKS)}|[x]"),
        json_grammar({"const": MARKS}),
        json_grammar(
            {
                "type": "object",
                "properties": {MARKS: {"enum": [MARKS]}},
                "required": [MARKS],
                "additionalProperties": False,
            }
        ),
    ],
    ids=["lark", "lark in parts", "choice", "regex", "json", "json keys"],
)
def test_text_that_looks_like_an_added_token_is_said_as_text(grammar: str) -> None:
    """The library's tokenizer makes one of it, which its parser then refuses."""
    answer, generated = matcher(grammar), list[int]()
    for _ in range(60):
        (mask,) = answer.masks(generated, Draft(), [ROOT])
        assert mask is not None
        if ENDS & {*allowed(mask)}:
            break
        forced = answer.forced(generated, [])
        assert not forced or allowed(mask) == forced[:1]
        generated.append(allowed(mask)[0])
    else:
        pytest.fail("it does not end")
    assert not {*generated} & tokenizer().get_added_tokens_decoder().keys()
    assert MARKS in tokenizer().decode(generated) or tokenizer().decode(generated) in ("b", "x")


def test_added_token_is_asked_for_by_its_name_or_id() -> None:
    (mark,) = ids("<tool_call>")
    for name in ("<tool_call>", f"<[{mark}]>"):
        answer = matcher(lark_grammar(f'start: {name} "x"'))
        (mask,) = answer.masks([], Draft(), [ROOT])
        assert mask is not None
        assert allowed(mask) == [mark]
        (after,) = answer.masks([mark, *ids("x")], Draft(), [ROOT])
        assert after is not None
        assert allowed(after) == sorted(ENDS)


def test_mark_inside_a_draft_ends_free_text_there() -> None:
    """What follows a thought is bound from the mark on, wherever in a Draft that lies."""
    thought, answer = ids("so it is</think>"), ids('{"value')
    free = matcher(THINKING)
    draft = Draft.chain([*thought, *answer])
    seen = free.constrained([], draft, room=40)
    assert seen.kept == tuple(range(len(draft)))
    assert len(draft) - 1 in seen.forced
    wrong = free.constrained([], Draft.chain([*thought, *ids(" the")]), room=40)
    assert wrong.kept == tuple(range(len(thought)))
    (after,) = free.masks(thought, Draft(), [ROOT])
    assert after is not None
    assert {tokenizer().decode([token]) for token in allowed(after)} == {"{", '{"'}


def test_committed_tokens_that_contradict_the_grammar_are_said_so() -> None:
    with pytest.raises(GrammarError, match="token 1 of the answer contradicts its grammar"):
        matcher(GRAMMARS["person"]).masks([ids('{"')[0], ids(" cat")[0]], Draft(), [ROOT])


def test_token_beyond_the_vocabulary_is_refused_and_nothing_else_with_it() -> None:
    answer = matcher(GRAMMARS["person"])
    begin, beyond = answer.masks([], Draft.chain([2048]), [ROOT, 0])
    assert beyond is None
    assert np.array_equal(answer.masks([], Draft(), [ROOT])[0], begin)  # type: ignore[arg-type]


def test_grammar_that_asks_for_too_much_is_refused() -> None:
    many = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1000)}}
    for grammar in (json_grammar(many), regex_grammar("a" * MAX_GRAMMAR), lark_grammar("start: thing")):
        with pytest.raises(GrammarError) as refused:
            compiled(grammar, tokens())
        assert 0 < len(str(refused.value)) <= 300


HOSTILE = {
    "nested counts": regex_grammar("((a{1,1000}){1,1000}){1,1000}"),
    "a far choice": regex_grammar("(a|b)*a(a|b){30}"),
    "two lines at once": regex_grammar("(.*a.{20}b.*)&(.*b.{22}a.*)"),
    "many values": json_grammar({"enum": [f"value {7919 * number}" for number in range(5000)]}),
    "a long array": json_grammar({"type": "array", "minItems": 100_000, "items": {"type": "integer"}}),
    "ambiguous": lark_grammar('start: a\na: (a a)? b*\nb: "x"* "x"?'),
    "itself": json_grammar({"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}),
    "optional properties": json_grammar(
        {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(300)}}
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammar_is_refused_or_costs_little_at_every_position(name: str) -> None:
    draw, slowest, generated = random.Random(0), 0.0, list[int]()
    try:
        hostile = matcher(HOSTILE[name])
        for _ in range(60):
            started = time.thread_time()
            (mask,) = hostile.masks(generated, Draft(), [ROOT])
            slowest = max(slowest, time.thread_time() - started)
            assert mask is not None
            token = draw.choice(allowed(mask))
            if token in ENDS:
                break
            generated.append(token)
    except GrammarError:
        pass
    assert slowest < 0.1


def test_compiled_lets_other_threads_run() -> None:
    many = json_grammar({"enum": [f"value {7919 * number}" for number in range(5000)]})
    tokens()
    turns, compiling = 0, threading.Thread(target=compiled, args=(many, tokens()))
    compiling.start()
    while compiling.is_alive():
        turns += 1
        time.sleep(0)
    compiling.join()
    assert turns > 10


def test_demo_grammar_takes_what_it_should() -> None:
    text = ids('{"name": "Ann", "age": 31, "tags": ["red"]}')
    assert PERSON["required"] == ["name", "age", "tags"]
    seen = matcher(GRAMMARS["person"]).constrained([], Draft.chain(text), room=len(text))
    assert seen.kept == tuple(range(len(text)))


def test_constrained_with_draft_probs_keeps_the_first_refused_token() -> None:
    right, wrong = ids('{"name'), ids(" cat")[0]
    tokens = (right[0], wrong, right[1])
    draft = Draft.chain(tokens, [SparseProbs((token,), (1.0,)) for token in tokens])
    seen = matcher(GRAMMARS["person"]).constrained([], draft, room=9, has_probs=True)
    assert (seen.kept, seen.draft.tokens, seen.draft.parents) == ((0, 1), tokens[:2], (ROOT, 0))
    assert matcher(GRAMMARS["person"]).constrained([], Draft.chain(tokens), room=9).kept == (0,)


@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
def test_token_that_was_drawn_although_a_grammar_refuses_it_biases_nothing(verify: Any) -> None:
    """Later guesses of a parallel draft are such: cut off, token 0 would come in 0.45 of cases."""
    names, sure = [ids(text)[0] for text in ("a", "b", "c")], SparseProbs((0,), (1.0,))
    is_kept = [
        bool(
            matcher(regex_grammar("[ab]"))
            .constrained([], Draft.chain([name], [sure]), room=1, has_probs=True)
            .kept
        )
        for name in names
    ]
    target, drawn = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.2, 0.3, 0.5])
    count, first = 2000, 0
    for number in range(count):
        key = 2654435761 * number + 99
        token, probs = sample_draft_token(drawn.log(), key, 10, 1)
        draft = Draft.chain([token], [probs]) if is_kept[token] else Draft()
        verdict = verify(draft, target.repeat(len(draft) + 1, 1), key, 10, 1)
        assert verdict.tokens[0] != 2
        first += verdict.tokens[0] == 0
    assert abs(first / count - 0.5) < 2.5 * (0.25 / count) ** 0.5
