"""Calls of Llama 4, which may begin an answer without a mark: in Python or in JSON, as the template asks."""

import json

import pytest

from gateway.api.openai.answer_format import of_chat_template
from gateway.api.openai.calls.grammar import CallGrammar
from tests.support.calls import AS_KEYWORDS, PYTHON, TOLD, TOOLS, WEATHER, Tokens, calls_of, read

TURN = "<|header_start|>assistant<|header_end|>\n\n"
MARKS = ["<|python_start|>", "<|python_end|>"]
IN_PYTHON = of_chat_template("Answer as in [func_name1(a=b)] <|header_start|>")
IN_JSON = of_chat_template('<|header_start|> "parameters": ')
AS_JSON = json.dumps({"name": "weather", "parameters": WEATHER}, ensure_ascii=False)


@pytest.fixture(scope="module")
def tokens():
    return Tokens(MARKS)


def grammar(answers, tokens):
    return CallGrammar(answers.calls, tokens.added, "tools")


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("answers", "text", "told"),
    [
        (IN_PYTHON, f"[{PYTHON}, now()]", TOLD),
        (IN_PYTHON, f"<|python_start|>[{PYTHON}, now()]<|python_end|>", TOLD),
        (IN_JSON, AS_JSON, TOLD[:1]),
        (IN_JSON, f"<|python_start|>{AS_JSON}<|python_end|>", TOLD[:1]),
    ],
    ids=["Python", "marked Python", "JSON", "marked JSON"],
)
def test_llama_calls_are_read_with_marks_and_without(answers, text, told, size):
    message, _ = read(answers, TURN, text, size)
    assert (calls_of(message), message["content"]) == (told, None)


@pytest.mark.parametrize("text", ["[1, 2] are numbers.", "[see](https://a.b)", "So: [now()]"])
def test_llama_list_that_is_no_call_stays_text(text):
    message, _ = read(IN_PYTHON, TURN, text, 2)
    assert message == {"role": "assistant", "refusal": None, "content": text}


def test_llama_forced_calls_in_python_need_no_mark(tokens):
    forced = grammar(IN_PYTHON, tokens).only_calls(TOOLS, several=True)
    assert tokens.follows(forced, f"[{AS_KEYWORDS}, now()]") == (True, True)
    assert tokens.follows(forced, f"[{AS_KEYWORDS}") == (True, False)


def test_llama_strict_calls_in_python_follow_their_schema_without_a_mark(tokens):
    strict = grammar(IN_PYTHON, tokens).valid_calls(TOOLS)
    text = f"[{AS_KEYWORDS}, now()]"
    assert tokens.follows(strict, text) == (True, True)
    assert tokens.follows(strict, text.replace("Rome", "Bonn"))[0] is False
    assert tokens.follows(strict, "{1, 2} is a set.") == (True, True)
