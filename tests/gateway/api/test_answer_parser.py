"""Parser of answers: words, thoughts and calls do not depend on how the text is cut, in any format."""

import json

import pytest

from gateway.api.openai.answer_format import marks, of_chat_template, of_template
from gateway.api.openai.answer_parser import AnswerParser, joined
from workshop.demo.chat import CHAT_TEMPLATE
from workshop.demo.chat import RESPONSE_TEMPLATE as OF_DEMO

RESPONSE_TEMPLATE = of_template(OF_DEMO)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("get_weather", "get_time")
]
PARIS, ROME = {"city": 'Paris {["é'}, {"city": "Rome", "days": [1, {"x": None}]}
WEATHER = json.dumps({"name": "get_weather", "arguments": PARIS})
TIME = json.dumps({"name": "get_time", "arguments": ROME}, ensure_ascii=False)
LLAMA = json.dumps({"name": "get_weather", "parameters": PARIS})
HERMES = "{% if tools %}<tool_call>{% endif %}<|im_start|>assistant\n"
QWEN3 = HERMES + "<think>"
MISTRAL = "[INST][/INST][TOOL_CALLS]"
LLAMA3 = "<|python_tag|><|start_header_id|>assistant<|end_header_id|>\n\n"


def said(template, text, prefix="", tools=TOOLS, size=3, most=None):
    parser = AnswerParser(template, prefix, tools, most)
    pieces = [text[first : first + size] for first in range(0, len(text), size)] or [""]
    deltas = [
        delta
        for number, piece in enumerate(pieces, start=1)
        for delta in parser.feed([piece], ends=number == len(pieces))
    ]
    return joined(deltas), deltas


def calls_of(message):
    functions = [call["function"] for call in message["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


FORMATS = {
    "demo": (RESPONSE_TEMPLATE, "<|assistant|>", f"I look.<tool_call>{WEATHER}</tool_call><|end|>"),
    "hermes": (
        of_chat_template(HERMES),
        "<|im_start|>assistant\n",
        f"I look.<tool_call>\n{WEATHER}\n</tool_call>",
    ),
    "qwen 3": (
        of_chat_template(QWEN3),
        "<|im_start|>user\n<think>?<|im_end|>\n<|im_start|>assistant\n",
        f"<think>hm {{</think>I look.<tool_call>\n{WEATHER}\n</tool_call>",
    ),
    "mistral": (of_chat_template(MISTRAL), "[INST] x[/INST]", f"I look.[TOOL_CALLS][{WEATHER}]</s>"),
    "llama 3, marked": (
        of_chat_template(LLAMA3),
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        f"I look.<|python_tag|>{LLAMA}<|eom_id|>",
    ),
    "llama 3": (of_chat_template(LLAMA3), "<|start_header_id|>assistant<|end_header_id|>\n\n", LLAMA),
}


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("name", FORMATS)
def test_parser_call_is_returned_by_name_and_arguments(name, size):
    template, prefix, text = FORMATS[name]
    message, _ = said(template, text, prefix, size=size)
    assert calls_of(message) == [("get_weather", PARIS)]
    assert (message["content"] or "").strip() == ("" if name == "llama 3" else "I look.")
    if name == "qwen 3":
        assert message["reasoning_content"] == "hm {"


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("template", "text"),
    [
        (RESPONSE_TEMPLATE, f"<tool_call>{WEATHER}</tool_call>\n<tool_call>{TIME}</tool_call><|end|>"),
        (of_chat_template(MISTRAL), f"[TOOL_CALLS][{WEATHER}, {TIME}]"),
    ],
    ids=["tags", "list"],
)
def test_parser_several_calls_have_own_indices(template, text, size):
    message, deltas = said(template, text, size=size)
    assert calls_of(message) == [("get_weather", PARIS), ("get_time", ROME)]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    told = [call["index"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert told == sorted(told)
    only, _ = said(template, text, size=size, most=1)
    assert calls_of(only) == [("get_weather", PARIS)]


def test_parser_arguments_come_before_they_are_complete():
    parser = AnswerParser(RESPONSE_TEMPLATE, "<|assistant|>", TOOLS, None)
    assert parser.feed(['<tool_call>{"name": "get_wea'], ends=False) == []
    (named,) = parser.feed(['ther", "arguments": {"ci'], ends=False)
    assert named["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"ci'}
    (more,) = parser.feed(['ty": "Pa'], ends=False)
    assert more == {"tool_calls": [{"index": 0, "function": {"arguments": 'ty": "Pa'}}]}


def test_parser_call_cut_off_is_returned_as_far_as_it_goes():
    message, _ = said(RESPONSE_TEMPLATE, f"<tool_call>{WEATHER[:-8]}")
    (call,) = message["tool_calls"]
    assert WEATHER.endswith(call["function"]["arguments"] + WEATHER[-8:])


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("body", ['{"name": ', "nonsense", "[1, 2]", '{"arguments": {}}', "{" * 500])
def test_parser_malformed_call_stays_text(body, size):
    message, _ = said(RESPONSE_TEMPLATE, f"Well, <tool_call>{body}</tool_call><|end|>", size=size)
    assert "tool_calls" not in message
    assert message["content"] == f"Well, {body}"


def test_parser_call_with_arguments_first_is_returned_once_complete():
    swapped = json.dumps({"arguments": PARIS, "name": "get_weather"})
    message, _ = said(RESPONSE_TEMPLATE, f"<tool_call>{swapped}</tool_call><tool_call>{TIME}</tool_call>")
    assert calls_of(message) == [("get_weather", PARIS), ("get_time", ROME)]


@pytest.mark.parametrize("size", [1, 1000])
def test_parser_name_with_a_wrong_escape_is_no_call(size):
    bad = '{"name": "\\x", "arguments": {}}'
    assert "tool_calls" not in said(RESPONSE_TEMPLATE, f"<tool_call>{bad}</tool_call>", size=size)[0]
    half = '{"name": "f\\ud800", "arguments": {}}'
    message, _ = said(RESPONSE_TEMPLATE, f"<tool_call>{half}</tool_call>", size=size)
    assert calls_of(message) == [("f?", {})]


def test_parser_without_tools_returns_a_call_as_text():
    message, _ = said(of_chat_template(QWEN3), f"<think>a</think><tool_call>{TIME}</tool_call>", tools=[])
    assert (message["content"], message["reasoning_content"]) == (TIME, "a")


def test_thinking_that_the_prompt_began_is_told_as_such():
    template = of_chat_template(QWEN3)
    message, _ = said(template, "so it is</think>\n\nYes.", "<|im_start|>assistant\n<think>\n")
    assert message["reasoning_content"].strip() == "so it is"
    assert message["content"].strip() == "Yes."


@pytest.mark.parametrize("source", ["{{ x }}", "f[ARGS]{}", "[f()]"])
def test_response_template_unknown_format_is_none(source):
    assert of_chat_template(source) is None


def test_response_template_demo_chat_template_shows_its_calls():
    known = of_chat_template(CHAT_TEMPLATE)
    assert calls_of(said(known, f"<tool_call>{WEATHER}</tool_call>")[0]) == [("get_weather", PARIS)]


def test_parser_keeps_only_the_special_tokens_that_its_template_goes_by():
    special = ["<|eot_id|>", "<|python_tag|>", "<|begin_of_text|>"]
    assert marks(of_chat_template(LLAMA3), special) == {"<|eot_id|>", "<|python_tag|>"}
    assert marks(RESPONSE_TEMPLATE, ["<|end|>", "<|user|>"]) == {"<|end|>"}
