"""Channels of harmony: thoughts, words to the user, calls and the answer are told apart."""

from dataclasses import replace

import pytest

from gateway.api.openai.answer_format import of_chat_template
from gateway.api.openai.calls.grammar import CallGrammar
from gateway.generation.form import json_schema, mark
from tests.support.calls import AS_JSON, HARMONY, HARMONY_TOKENS, TOLD, TOOLS, Tokens, calls_of, read

HARMONY_CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{AS_JSON}"
HARMONY_THOUGHT = "<|channel|>analysis<|message|>Hm, {x}.<|end|><|start|>assistant"
HARMONY_WORDS = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
HARMONY_ANSWER = "<|channel|>final<|message|>It rains."


@pytest.fixture(scope="module")
def harmony():
    """Returns the format, and tokens without the end of a call, which ends the answer."""
    return of_chat_template(HARMONY), Tokens(HARMONY_TOKENS, end=0)


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    "call",
    [
        HARMONY_CALL,
        f" to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{AS_JSON}",
        f"<|channel|>commentary to=functions.weather<|message|>{AS_JSON}<|call|>",
    ],
    ids=["behind the channel", "in the role", "without a type"],
)
def test_harmony_thoughts_words_and_calls_are_told_apart(harmony, call, size):
    answers, _ = harmony
    message, _ = read(answers, "<|start|>assistant", HARMONY_THOUGHT + HARMONY_WORDS + call, size)
    assert message["reasoning_content"] == "Hm, {x}."
    assert message["content"] == "I look."
    assert calls_of(message) == TOLD[:1]


@pytest.mark.parametrize("size", [1, 1000])
def test_harmony_final_channel_is_the_answer(harmony, size):
    answers, _ = harmony
    message, _ = read(answers, "<|start|>assistant", HARMONY_THOUGHT + HARMONY_ANSWER, size)
    assert message == {
        "role": "assistant",
        "refusal": None,
        "content": "It rains.",
        "reasoning_content": "Hm, {x}.",
    }


def test_harmony_forms_begin_behind_thoughts(harmony):
    answers, tokens = harmony
    thoughts = answers.thoughts_before("<|start|>assistant", tokens.added)
    grammar = CallGrammar(answers.calls, tokens.added, "tools")
    forced = replace(grammar.only_calls(TOOLS, several=False), thoughts=thoughts)
    assert tokens.follows(forced, HARMONY_THOUGHT + HARMONY_CALL) == (True, True)
    assert tokens.follows(forced, HARMONY_CALL) == (True, True)
    assert tokens.follows(forced, HARMONY_THOUGHT + HARMONY_ANSWER)[0] is False
    strict = replace(grammar.valid_calls(TOOLS), thoughts=thoughts)
    for text in (HARMONY_ANSWER, HARMONY_WORDS + HARMONY_CALL, HARMONY_WORDS + HARMONY_ANSWER):
        assert tokens.follows(strict, HARMONY_THOUGHT + text) == (True, True), text
    assert tokens.follows(strict, HARMONY_CALL.replace("Rome", "Bonn"))[0] is False
    final = mark(answers.before_text, tokens.added)
    answer = replace(json_schema('{"const": {"a": 1}}', ""), thoughts=thoughts, opening=final)
    said = '<|channel|>final<|message|>{"a": 1}'
    assert tokens.follows(answer, HARMONY_THOUGHT + said) == (True, True)
    assert tokens.follows(answer, '{"a": 1}')[0] is False
    either = replace(answer, calls=grammar.only_calls(TOOLS, several=False).source)
    assert tokens.follows(either, HARMONY_THOUGHT + said) == (True, True)
    assert tokens.follows(either, HARMONY_THOUGHT + HARMONY_CALL) == (True, True)
    assert tokens.follows(either, HARMONY_THOUGHT + HARMONY_ANSWER)[0] is False


def test_harmony_answer_that_continues_a_text_is_read_as_text_and_held_to_its_form(harmony):
    answers, tokens = harmony
    message, _ = read(answers, answers.before_text, " is blue.", 2)
    assert message["content"] == " is blue."
    form = answers.held(json_schema('{"const": {"a": 1}}', ""), answers.before_text, tokens.added)
    assert tokens.follows(form, '{"a": 1}') == (True, True)
    assert tokens.follows(form, HARMONY_THOUGHT)[0] is False
