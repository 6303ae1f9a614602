"""Calls of each family of models: found in the chat template, read while streaming, and held to a schema.

Templates are our own, with the marks that the families publish.
"""

import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import AddedToken

from gateway.api.openai.answer_format import of_chat_template
from gateway.api.openai.answer_parser import AnswerParser, joined
from gateway.api.openai.calls.grammar import CallGrammar
from gateway.errors import InvalidRequestError
from gateway.generation.form import json_schema, mark
from outrider.decoding.grammar import compiled, token_table
from tests.fakes.tokenizers import byte_tokenizer

END = 256
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "note": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "parameters": EMPTY}},
]
NOTE = 'a "b"\n</p <x> é\\'
WEATHER = {"city": "Rome", "note": NOTE, "days": 3, "tags": ["x y"]}
TOLD = [("weather", WEATHER), ("now", {})]
AS_JSON = json.dumps(WEATHER, ensure_ascii=False)


def xml(begin, padding, close, between):
    values = {"city": "Rome", "note": NOTE, "days": "3", "tags": '["x y"]'}
    return between.join(
        begin.format(key) + padding + value + padding + close for key, value in values.items()
    )


GLM = xml("<arg_key>{}</arg_key>\n<arg_value>", "", "</arg_value>", "\n")
MINIMAX = xml('<parameter name="{}">', "", "</parameter>", "\n")
DSML = "\n".join(
    f'<｜DSML｜parameter name="{key}" string="{is_text}">{value}</｜DSML｜parameter>'
    for key, is_text, value in (
        ("city", "true", "Rome"),
        ("note", "true", NOTE),
        ("days", "false", "3"),
        ("tags", "false", '["x y"]'),
    )
)
BARE = f'{{city:<|"|>Rome<|"|>,days:3,note:<|"|>{NOTE}<|"|>,tags:[<|"|>x y<|"|>]}}'
# By family: text of its chat template, end of the prompt, two calls, tokens of the vocabulary.
FAMILIES = {
    "hermes": (
        "<tool_call><|im_start|>assistant\n",
        "<|im_start|>assistant\n",
        f'<tool_call>\n{{"name": "weather", "arguments": {AS_JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        ["<tool_call>", "</tool_call>"],
    ),
    "qwen xml": (
        "<tool_call><function=",
        "<|im_start|>assistant\n",
        "<tool_call>\n<function=weather>\n"
        + xml("<parameter={}>", "\n", "</parameter>", "\n")
        + "\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        ["<tool_call>", "</tool_call>"],
    ),
    "glm 4.5": (
        "<tool_call><arg_key>x</arg_key>\n<arg_value>",
        "<|assistant|>",
        f"<tool_call>weather\n{GLM}\n</tool_call>\n<tool_call>now\n</tool_call>",
        ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    ),
    "glm 4.7": (
        "<tool_call><arg_key>x</arg_key><arg_value>",
        "<|assistant|>",
        f"<tool_call>weather{xml('<arg_key>{}</arg_key><arg_value>', '', '</arg_value>', '')}</tool_call>"
        "<tool_call>now</tool_call>",
        ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    ),
    "minimax": (
        "<minimax:tool_call>]~b]ai\n",
        "]~b]ai\n",
        f'<minimax:tool_call>\n<invoke name="weather">\n{MINIMAX}\n</invoke>\n<invoke name="now">\n'
        "</invoke>\n</minimax:tool_call>",
        ["<minimax:tool_call>", "</minimax:tool_call>"],
    ),
    "deepseek 3": (
        "tool▁sep\n```json",
        "<｜Assistant｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{AS_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}"
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")],
    ),
    "deepseek 3.1": (
        "tool▁sep",
        "<｜Assistant｜></think>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{AS_JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")],
    ),
    "deepseek 3.2": (
        "｜DSML｜function_calls>",
        "<｜Assistant｜></think>",
        f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n{DSML}\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        ["｜DSML｜"],
    ),
    "kimi k2": (
        "<|tool_calls_section_begin|>",
        "<|im_assistant|>assistant<|im_middle|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{AS_JSON}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        [
            f"<|tool_call{name}|>"
            for name in ("s_section_begin", "_begin", "_argument_begin", "_end", "s_section_end")
        ],
    ),
    "mistral": (
        "[TOOL_CALLS]",
        "[/INST]",
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {AS_JSON}}}, {{"name": "now", "arguments": {{}}}}]',
        ["[TOOL_CALLS]"],
    ),
    "mistral 11": (
        "[TOOL_CALLS][ARGS]",
        "[/INST]",
        f"[TOOL_CALLS]weather[ARGS]{AS_JSON}[TOOL_CALLS]now[ARGS]{{}}",
        ["[TOOL_CALLS]", "[ARGS]"],
    ),
    "gemma 4": (
        '<|tool_call><|"|>',
        "<|turn>model\n",
        f"<|tool_call>call:weather{BARE}<tool_call|><|tool_call>call:now{{}}<tool_call|>",
        ["<|tool_call>", "<tool_call|>", '<|"|>'],
    ),
    "function gemma": (
        "<start_function_call><escape>",
        "<start_of_turn>model\n",
        f"<start_function_call>call:weather{BARE}<end_function_call><start_function_call>call:now{{}}"
        "<end_function_call>".replace('<|"|>', "<escape>"),
        ["<start_function_call>", "<end_function_call>", "<escape>"],
    ),
}
PYTHON = f"weather(city='Rome', note={NOTE!r}, days=3, tags=['x y'])"
FAMILIES |= {
    "olmo 3": (
        "<function_calls>",
        "<|im_start|>assistant\n",
        f"<function_calls>\n{PYTHON}\nnow()\n</function_calls>",
        ["<function_calls>", "</function_calls>"],
    ),
    "lfm 2": (
        "<|tool_call_start|>",
        "<|im_start|>assistant\n",
        f"<|tool_call_start|>[{PYTHON}, now()]<|tool_call_end|>",
        ["<|tool_call_start|>", "<|tool_call_end|>"],
    ),
}
HARMONY = "<|channel|><|call|><|start|>assistant"
WHOLE = ("<function_calls>", "<|tool_call_start|>")  # formats whose arguments come when they are complete
# Grammars have texts as JSON has them.
AS_KEYWORDS = f'weather(city="Rome", note={json.dumps(NOTE, ensure_ascii=False)}, days=3, tags=["x y"])'
HARMONY_TOKENS = [f"<|{name}|>" for name in ("channel", "start", "end", "message", "constrain")]


class Tokens:
    """Tokens of bytes, and the marks of one family as added tokens."""

    def __init__(self, marks, end=END):
        self.tokenizer = byte_tokenizer()
        self.tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks])
        self.added = {mark: self.tokenizer.token_to_id(mark) for mark in marks}
        self.table = token_table(self.tokenizer.to_str(), self.tokenizer.get_vocab_size(), [end])

    def matcher(self, form):
        return compiled(form.grammar(), self.table)

    def follows(self, form, text):
        """Returns whether the form accepts the text, and whether the answer may end there."""
        matcher, ids = self.matcher(form), self.tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids), matcher.is_accepting()

    def said(self, form, seed, most=300):
        """Returns what a model says that follows the form and chooses at random."""
        chooser, matcher, said = random.Random(seed), self.matcher(form), []
        while not matcher.is_stopped() and len(said) < most:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits)
            ids = [*self.added.values(), END]
            marks = [token for token in allowed if token in ids]
            said.append(int(chooser.choice(marks if marks and chooser.random() < 0.2 else allowed)))
            if said[-1] == END:
                return self.tokenizer.decode(said[:-1], skip_special_tokens=False)
            assert matcher.try_consume_tokens([said[-1]])
        return self.tokenizer.decode(said, skip_special_tokens=False) if matcher.is_accepting() else None


@pytest.fixture(scope="module", params=[*FAMILIES])
def family(request):
    source, prefix, text, marks = FAMILIES[request.param]
    return of_chat_template(source), prefix, text, Tokens(marks)


@pytest.fixture(scope="module", params=[name for name in FAMILIES if FAMILIES[name][0] not in WHOLE])
def streamed(request):
    """Returns a family whose arguments come before a call is complete."""
    source, prefix, text, _ = FAMILIES[request.param]
    return of_chat_template(source), prefix, text


def read(answers, prefix, text, size=4, tools=TOOLS):
    parser = AnswerParser(answers, prefix, tools, None)
    pieces = [text[first : first + size] for first in range(0, len(text), size)] or [""]
    ends = [False] * (len(pieces) - 1) + [True]
    deltas = [
        delta for piece, end in zip(pieces, ends, strict=True) for delta in parser.feed(piece, ends=end)
    ]
    return joined(deltas), deltas


def calls_of(message):
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


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
    begun = joined(parser.feed(text[: behind + 3], ends=False))
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


def test_whatever_is_said_under_force_is_read_as_a_call_of_the_schema(family):
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


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "allOf": []}}}, "allOf"),
        ({"type": "object", "patternProperties": {}}, "patternProperties"),
    ],
)
@pytest.mark.parametrize("name", ["qwen xml", "gemma 4"])
def test_schema_that_a_family_cannot_say_is_refused_by_name(name, schema, word):
    answers = of_chat_template(FAMILIES[name][0])
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(InvalidRequestError, match=f"'f' cannot be held to its schema's {word}") as refused:
        CallGrammar(answers.calls, {}, "tools").only_calls(tools, several=False)
    assert refused.value.field == "tools"


VALUES = {
    "text": ({"type": "string"}, "5", "5"),
    "number": ({"type": "integer"}, "5", 5),
    "any of": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
    "text of any of": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
    "python": ({"type": "boolean"}, "True", True),
    "reference": ({"$ref": "#/$defs/word"}, "5", "5"),
    "not JSON": ({"type": "integer"}, "five", "five"),
    "no number": ({"type": "number"}, "NaN", "NaN"),
    "undeclared": (None, "5", "5"),
    "object": ({"type": "object"}, '{"a":  [1]}', {"a": [1]}),
}


@pytest.mark.parametrize("name", VALUES)
def test_value_between_marks_is_of_the_type_that_the_schema_declares(name):
    schema, written, expected = VALUES[name]
    root = {"type": "object", "properties": {} if schema is None else {"x": schema}}
    root["$defs"] = {"word": {"type": "string"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": root}}]
    answers = of_chat_template(FAMILIES["qwen xml"][0])
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{written}\n</parameter>\n</function>\n</tool_call>"
    message, _ = read(answers, "", text, 1, tools)
    assert calls_of(message) == [("f", {"x": expected})]


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "maxLength": 3}, "abc", "abcd"),
        ({"type": "string", "pattern": "^[a-c]+/$"}, "ab/", "abd/"),
        ({"type": ["string", "null"], "enum": ["a", None]}, "a", "b"),
        ({"anyOf": [{"type": "integer"}, {"const": "all"}]}, "all", "some"),
        ({"$ref": "#/$defs/few"}, "2", "7"),
    ],
    ids=["length", "pattern", "values", "any of", "reference"],
)
def test_text_between_marks_is_held_to_its_schema(schema, right, wrong):
    root = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    root["$defs"] = {"few": {"type": "integer", "maximum": 3}}
    source, _, _, marks = FAMILIES["qwen xml"]
    tokens, answers = Tokens(marks), of_chat_template(source)
    tools = [{"type": "function", "function": {"name": "f", "parameters": root}}]
    form = CallGrammar(answers.calls, tokens.added, "tools").only_calls(tools, several=False)
    text = "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert tokens.follows(form, text.format(right)) == (True, True)
    assert tokens.follows(form, text.format(wrong))[0] is False


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
