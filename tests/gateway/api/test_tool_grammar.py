"""Calls that are forced or strict, in each format: what may be said, and that it is read as a call.

Templates are our own, on the token layouts that Qwen, Hermes, Llama 3 and Mistral publish.
"""

import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken

from gateway.api.openai.answer_format import CALLS, of_chat_template, of_template
from gateway.api.openai.answer_parser import AnswerParser, joined
from gateway.api.openai.calls.grammar import CallGrammar
from outrider.decoding.grammar import compiled, token_table
from tests.fakes.tokenizers import byte_tokenizer
from workshop.demo.chat import RESPONSE_TEMPLATE

END = 256
CITY = {"enum": ["Rome", "Oslo"]}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "time")
]
HERMES = "<tool_call><|im_start|>assistant\n"
LLAMA3 = "<|python_tag|><|start_header_id|>assistant<|end_header_id|>\n\n"
MISTRAL = "[AVAILABLE_TOOLS][TOOL_CALLS][INST][/INST]"


def call(name, city, key="arguments"):
    return json.dumps({"name": name, key: {"city": city}})


FORMATS = {
    "hermes": (HERMES, f"<tool_call>{call('weather', 'Rome')}</tool_call>", "<tool_call>"),
    "llama 3": (LLAMA3, call("weather", "Rome", "parameters"), ""),
    "llama 3, marked": (LLAMA3, f"<|python_tag|>{call('weather', 'Rome', 'parameters')}", "<|python_tag|>"),
    "mistral": (MISTRAL, f"[TOOL_CALLS][{call('weather', 'Rome')}]", "[TOOL_CALLS]"),
}
SEVERAL = {
    "hermes": "".join(
        f"<tool_call>{called}</tool_call>" for called in (call("time", "Oslo"), call("weather", "Rome"))
    ),
    "mistral": f"[TOOL_CALLS][{call('time', 'Oslo')}, {call('weather', 'Rome')}]",
}


class Tokens:
    """Tokens of bytes, and the marks of these layouts as added tokens."""

    def __init__(self):
        self.tokenizer = byte_tokenizer()
        marks = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"]
        self.tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks])
        self.added = {mark: self.tokenizer.token_to_id(mark) for mark in marks}
        self.table = token_table(self.tokenizer.to_str(), self.tokenizer.get_vocab_size(), [END])

    def matcher(self, form):
        return compiled(form.grammar(), self.table)

    def follows(self, form, text):
        """Returns whether the form accepts the text, and whether the answer may end there."""
        matcher, ids = self.matcher(form), self.tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids), matcher.is_accepting()


@pytest.fixture(scope="module")
def tokens():
    return Tokens()


def format_of(source, tokens):
    return CallGrammar(of_chat_template(source).calls, tokens.added, "tool_choice")


def read(source, text):
    parser = AnswerParser(of_chat_template(source), "", TOOLS, None)
    calls = joined(parser.feed([text], ends=True)).get("tool_calls", ())
    return [(made["function"]["name"], json.loads(made["function"]["arguments"])) for made in calls]


@pytest.mark.parametrize("name", FORMATS)
def test_forced_answer_is_a_call_and_nothing_else(tokens, name):
    source, text, _ = FORMATS[name]
    form = format_of(source, tokens).only_calls(TOOLS, several=False)
    assert tokens.follows(form, text) == (True, True)
    assert read(source, text) == [("weather", {"city": "Rome"})]
    for wrong in (
        f"I look. {text}",
        text.replace("Rome", "Bonn"),
        text.replace("weather", "news"),
        f"{text} So.",
    ):
        assert tokens.follows(form, wrong)[0] is False, wrong
    assert tokens.follows(form, text[:-3])[1] is False


@pytest.mark.parametrize("name", SEVERAL)
def test_forced_calls_are_several_if_the_format_has_room_for_them(tokens, name):
    source, text = FORMATS[name][0], SEVERAL[name]
    format_ = format_of(source, tokens)
    assert tokens.follows(format_.only_calls(TOOLS, several=True), text) == (True, True)
    assert tokens.follows(format_.only_calls(TOOLS, several=False), text)[0] is False
    assert read(source, text) == [("time", {"city": "Oslo"}), ("weather", {"city": "Rome"})]


@pytest.mark.parametrize("name", FORMATS)
def test_strict_calls_are_right_and_text_is_free(tokens, name):
    source, text, mark = FORMATS[name]
    form = format_of(source, tokens).valid_calls(TOOLS)
    assert tokens.follows(form, 'It rains, "é" {so}\n[x].') == (True, True)
    assert tokens.follows(form, text) == (True, True)
    assert tokens.follows(form, text.replace("Rome", "Bonn"))[0] is False
    if mark:
        assert tokens.follows(form, f"I look. {text}") == (True, True)
        assert tokens.follows(form, f"I look. {mark}nonsense")[0] is False


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("source", [HERMES, LLAMA3, MISTRAL])
def test_forced_text_of_any_model_is_read_as_a_call(tokens, source, seed):
    chooser = random.Random(seed)
    matcher = tokens.matcher(format_of(source, tokens).only_calls(TOOLS, several=False))
    said = []
    while not matcher.is_stopped() and len(said) < 300:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        said.append(int(chooser.choice(np.flatnonzero(bits))))
        if said[-1] == END:
            break
        assert matcher.try_consume_tokens([said[-1]])
    text = tokens.tokenizer.decode([token for token in said if token != END], skip_special_tokens=False)
    ((name, arguments),) = read(source, text)
    assert name in ("weather", "time")
    assert arguments["city"] in CITY["enum"]


def test_calls_between_patterns_are_in_no_known_format():
    calls = {**RESPONSE_TEMPLATE["fields"][CALLS], "open_pattern": "<call [0-9]>"}
    assert of_template(RESPONSE_TEMPLATE).calls is not None
    del calls["open"]
    assert of_template({**RESPONSE_TEMPLATE, "fields": {CALLS: calls}}).calls is None
