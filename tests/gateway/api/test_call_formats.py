"""Calls of each family of models: found in the chat template, read while streaming, and held to a schema."""

import re

import pytest

from gateway.api.openai.answer_format import of_chat_template
from gateway.api.openai.answer_parser import AnswerParser, joined
from gateway.api.openai.calls.grammar import CallGrammar
from tests.support.calls import (
    AS_KEYWORDS,
    FAMILIES,
    PYTHON,
    SCHEMA,
    TOLD,
    TOOLS,
    WHOLE,
    Tokens,
    calls_of,
    read,
)


@pytest.fixture(scope="module", params=[*FAMILIES])
def family(request):
    source, prefix, text, marks = FAMILIES[request.param]
    return of_chat_template(source), prefix, text, Tokens(marks)


@pytest.fixture(scope="module", params=[name for name in FAMILIES if FAMILIES[name][0] not in WHOLE])
def streamed(request):
    """Returns a family whose arguments come before a call is complete."""
    source, prefix, text, _ = FAMILIES[request.param]
    return of_chat_template(source), prefix, text


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_of_a_family_are_read_in_any_pieces(family, size):
    answers, prefix, text, _ = family
    message, _ = read(answers, prefix, f"I look.{text}", size)
    assert calls_of(message) == TOLD
    assert message["content"] == "I look."


def test_text_of_an_argument_comes_before_the_call_is_complete(streamed):
    answers, prefix, text = streamed
    behind = text.index("Rome")
    parser = AnswerParser(answers, prefix, TOOLS, None)
    begun = joined(parser.feed([text[: behind + 3]], ends=False))
    assert begun["tool_calls"][0]["function"]["name"] == "weather"
    assert "city" in begun["tool_calls"][0]["function"]["arguments"]


def test_calls_that_are_cut_off_keep_what_was_written(streamed):
    answers, prefix, text = streamed
    message, _ = read(answers, prefix, text[: text.index("é")])
    (call,) = message["tool_calls"]
    assert call["function"]["arguments"].startswith('{"city": "Rome"')


def test_malformed_calls_stay_text(family):
    answers, prefix, _, _ = family
    message, _ = read(answers, prefix, f"Well, {answers.calls.mark}~ nonsense", 5)
    assert "tool_calls" not in message
    assert message["content"].startswith("Well,")
    assert message["content"].endswith("~ nonsense")


def test_forced_calls_follow_the_schema_and_nothing_else(family):
    answers, _, text, tokens = family
    text = text.replace(PYTHON, AS_KEYWORDS)
    form = CallGrammar(answers.calls, tokens.added, "tool_choice").only_calls(TOOLS, several=True)
    assert tokens.follows(form, text) == (True, True)
    for wrong in (f"So. {text}", text.replace("Rome", "Bonn"), text.replace("weather", "news")):
        assert tokens.follows(form, wrong)[0] is False, wrong
    once = CallGrammar(answers.calls, tokens.added, "tool_choice").only_calls(TOOLS, several=False)
    assert tokens.follows(once, text)[0] is False


def test_strict_calls_leave_other_text_free(family):
    answers, _, text, tokens = family
    text = text.replace(PYTHON, AS_KEYWORDS)
    form = CallGrammar(answers.calls, tokens.added, "tools").valid_calls(TOOLS)
    assert tokens.follows(form, "It rains, so [x] {y}\n<b>.") == (True, True)
    assert tokens.follows(form, f"I look.{text}") == (True, True)
    assert tokens.follows(form, f"I look.{text.replace('Rome', 'Bonn')}")[0] is False


def test_forced_text_is_read_as_a_call_of_the_schema(family):
    answers, prefix, _, tokens = family
    form = CallGrammar(answers.calls, tokens.added, "tool_choice").only_calls(TOOLS[:1], several=False)
    texts = [text for seed in range(8) if (text := tokens.said(form, seed)) is not None]
    assert len(texts) > 2  # the rest is longer than the test waits for
    for text in texts:
        ((name, arguments),) = calls_of(read(answers, prefix, text)[0])
        assert name == "weather"
        assert arguments["city"] in ("Rome", "Oslo")
        assert 1 <= arguments.get("days", 1) <= 9
        assert arguments.keys() <= SCHEMA["properties"].keys()


def test_qwen_call_without_its_first_mark_is_read():
    answers = of_chat_template(FAMILIES["qwen xml"][0])
    text = "So:\n<function=now>\n</function>\n</tool_call>"
    message, _ = read(answers, "", text, 2)
    assert (message["content"], calls_of(message)) == ("So:", [("now", {})])


def test_unknown_marks_are_no_format():
    assert of_chat_template("{{ x }}[ARGS]") is None


def test_id_that_the_model_writes_twice_is_told_once():
    source, prefix, text, _ = FAMILIES["kimi k2"]
    message, _ = read(of_chat_template(source), prefix, text.replace("now:1", "weather:0"))
    first, second = [call["id"] for call in message["tool_calls"]]
    assert first == "functions.weather:0"
    assert second == "functions.weather:1"


def test_answer_that_continues_a_text_keeps_its_newlines():
    answers = of_chat_template("<think><tool_call>")
    message, _ = read(answers, "", "\n\nand so on", 1)
    assert message["content"] == "\n\nand so on"
    begun, _ = read(answers, "<|im_start|>assistant\n", "\nand so on", 1)
    assert begun["content"] == "and so on"


def test_ids_are_those_that_the_family_takes_back():
    for name, pattern in (("mistral 11", "[a-z0-9]{9}"), ("hermes", "call_[a-f0-9]{32}")):
        source, prefix, text, _ = FAMILIES[name]
        message, _ = read(of_chat_template(source), prefix, text)
        assert all(re.fullmatch(pattern, call["id"]) for call in message["tool_calls"])
    source, prefix, text, _ = FAMILIES["kimi k2"]
    message, _ = read(of_chat_template(source), prefix, text)
    assert [call["id"] for call in message["tool_calls"]] == ["functions.weather:0", "functions.now:1"]
