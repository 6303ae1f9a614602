"""Tool calls in the format of each model family, as in published templates, with helpers for tests."""

import json
import random

import numpy as np
from tokenizers import AddedToken

from gateway.api.openai.answer_parser import AnswerParser, joined
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
KIMI_3 = "".join(
    f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
    for key, kind, value in (
        ("city", "string", "Rome"),
        ("note", "string", NOTE),
        ("days", "number", "3"),
        ("tags", "array", '["x y"]'),
    )
)
BARE = f'{{city:<|"|>Rome<|"|>,days:3,note:<|"|>{NOTE}<|"|>,tags:[<|"|>x y<|"|>]}}'
# Per family: text of its chat template, end of the prompt, two calls, special tokens.
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
    "kimi k3": (
        "<|open|><|sep|>",
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>',
        "<|close|>response<|sep|><|open|>tools<|sep|>"
        f'<|open|>call tool="weather" index="1"<|sep|>{KIMI_3}<|close|>call<|sep|>'
        '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|>",
        ["<|open|>", "<|close|>", "<|sep|>"],
    ),
    "granite 3": (
        "<|tool_call|>",
        "<|start_of_role|>assistant<|end_of_role|>",
        f'<|tool_call|>[{{"name": "weather", "arguments": {AS_JSON}}}, {{"name": "now", "arguments": {{}}}}]',
        ["<|tool_call|>"],
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
    "llama 4, in python": (
        "[func_name1(<|header_start|>",
        "<|header_start|>assistant<|header_end|>\n\n",
        f"<|python_start|>[{PYTHON}, now()]",
        ["<|python_start|>", "<|python_end|>"],
    ),
}
HARMONY = "<|channel|><|call|><|start|>assistant"
# Formats whose arguments are sent only when they are complete.
WHOLE = ("<function_calls>", "<|tool_call_start|>", "[func_name1(<|header_start|>")
# Grammars write strings as in JSON.
AS_KEYWORDS = f'weather(city="Rome", note={json.dumps(NOTE, ensure_ascii=False)}, days=3, tags=["x y"])'
HARMONY_TOKENS = [f"<|{name}|>" for name in ("channel", "start", "end", "message", "constrain")]


class Tokens:
    """Byte tokenizer with the marks of one family as added tokens."""

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
        """Returns a random text of the form, as a model would write it; None if it is cut off."""
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


def read(answers, prefix, text, size=4, tools=TOOLS):
    parser = AnswerParser(answers, prefix, tools, None)
    pieces = [text[first : first + size] for first in range(0, len(text), size)] or [""]
    ends = [False] * (len(pieces) - 1) + [True]
    deltas = [
        delta for piece, end in zip(pieces, ends, strict=True) for delta in parser.feed([piece], ends=end)
    ]
    return joined(deltas), deltas


def calls_of(message):
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]
