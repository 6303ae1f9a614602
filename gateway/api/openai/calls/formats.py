"""Formats of tool calls: a row for each family of models, found by marks in the chat template.

A row describes a call twice: as texts, for the grammar that constrains the model, and as patterns, for the
parser. Patterns also accept common deviations. The formats are those of the families' published chat
templates.
"""

import html
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

PYTHON_TAG = "<|python_tag|>"
# JSON object with the name first, then the arguments; the items of a list are such objects as well.
OBJECT = (
    r'[\s\[,;}]*\{\s*"name"\s*:\s*(?P<quoted>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
BEHIND_OBJECTS = r"[\s\]},;]*"


@dataclass(frozen=True)
class Json:
    """Arguments as a JSON object."""


@dataclass(frozen=True)
class Parameters:
    """Arguments one by one between marks: text unquoted, all other values as JSON."""

    before_key: str
    before_value: str
    after_value: str
    end: str = ""  # mark after the last argument; empty: the end of the call ends the arguments
    between: str = ""  # whitespace between two arguments
    padding: str = ""  # newline around each value, or nothing
    # Replaces before_value if the value is not text; empty: before_value is kept. {type} is replaced by the
    # JSON type.
    before_json: str = ""
    escapes_keys: bool = False  # whether & and " in a key are written &amp; and &quot;, as the key is quoted

    def escaped(self, key: str) -> str:
        """Returns a key as it is written between its marks."""
        return key.replace("&", "&amp;").replace('"', "&quot;") if self.escapes_keys else key

    def unescaped(self, key: str) -> str:
        """Returns the key that is written between its marks."""
        return html.unescape(key) if self.escapes_keys else key


@dataclass(frozen=True)
class Bare:
    """Arguments as an object with unquoted keys in alphabetical order."""

    quote: str  # mark before and after each text


@dataclass(frozen=True)
class Keywords:
    """Arguments as keyword arguments of Python, between parentheses."""


@dataclass(frozen=True)
class CallFormat:
    """Format of a family's calls, between two marks."""

    mark: str  # mark that begins calls
    last: str  # mark that ends calls; empty: the next mark or the end of the answer ends them
    head: str  # pattern of everything before arguments, with the group name, or quoted for a JSON string
    before_name: str
    after_name: str  # in it, 0 stands for any number
    arguments: Json | Parameters | Bare | Keywords = Json()
    after_arguments: str = ""
    tail: str = r"\s*"  # pattern of everything that may follow arguments
    alone: str = ""  # pattern of a whole call without arguments, if only its end shows that
    # Calls between the two marks: one call each time, or all calls; or the answer has a single call.
    marked: Literal["each", "all", "single"] = "each"
    first: str = ""  # text before the first call between the marks
    between: str = ""  # text between two calls
    end: str = ""  # text after the last call between the marks
    key: str = ""  # name of the arguments if a call is a JSON object
    needs_mark: bool = True  # False: calls may begin an answer without their mark
    opens: str = ""  # pattern of the mark in a model's answer; empty: exactly the mark
    closes: str = ""  # pattern of the last mark in a model's answer; empty: exactly the last mark
    stop: str = ""  # token that ends an answer after calls, as the end token does after text
    after_text: str = ""  # marks after an answer without calls, before the token that ends it
    # Ids that the family's templates accept: any, nine letters and digits, or functions.NAME:NUMBER.
    ids: Literal["any", "nine", "counted"] = "any"

    def region(self) -> dict[str, Any]:
        """Returns the field of a response template that describes where calls are in an answer."""
        region: dict[str, Any] = {
            "open_pattern": self.opens or rf"\s*{re.escape(self.mark)}",
            "repeats": True,
        }
        if closes := self.closes or re.escape(self.last):
            region["close_pattern"] = closes
        if not self.key:
            return region
        item = "{" if self.marked == "all" else "{content."
        called = {"name": f"{item}name}}", "arguments": f"{item}{self.key}}}"}
        region |= {"content": "json", "transform": {"type": "function", "function": called}}
        return region | ({"transform_each": True} if self.marked == "all" else {})


def _of_objects(mark: str, last: str, key: str = "arguments", newline: str = "", **more: Any) -> CallFormat:
    """Returns a format whose calls are JSON objects. newline: text inside the marks."""
    return CallFormat(
        mark,
        last,
        OBJECT,
        f'{newline}{{"name": ',
        f', "{key}": ',
        after_arguments="}" + newline,
        tail=BEHIND_OBJECTS,
        key=key,
        **more,
    )


def _of_list(mark: str, last: str, key: str = "arguments", **more: Any) -> CallFormat:
    """Returns a format whose calls are the items of a JSON list."""
    return _of_objects(mark, last, key, marked="all", first="[", between=", ", end="]", **more)


def _glm(newline: str) -> CallFormat:
    arguments = Parameters("<arg_key>", f"</arg_key>{newline}<arg_value>", "</arg_value>", between=newline)
    return CallFormat(
        "<tool_call>",
        "</tool_call>",
        r"\s*(?P<name>[^\s<{]+)\s*(?=<arg_key>)",
        "",
        newline,
        arguments,
        between=newline,
        alone=r"\s*(?P<name>[^\s<{]+)\s*",
    )


def _deepseek(head: str, before_name: str, after_name: str, fence: str, between: str) -> CallFormat:
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    tail = rf"(?:\s|```|{end})*"
    return CallFormat(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        rf"{tail}{begin}{head}\s*(?=\{{)",
        begin + before_name,
        after_name,
        after_arguments=fence + end,
        tail=tail,
        marked="all",
        between=between,
    )


def _dsml(block: str) -> CallFormat:
    """Returns the format of DeepSeek V3.2 and V4. block: name of the mark around the calls."""
    mark, last, end = f"<｜DSML｜{block}>", f"</｜DSML｜{block}>", "</｜DSML｜invoke>"
    parameters = Parameters(
        '<｜DSML｜parameter name="',
        '" string="true">',
        "</｜DSML｜parameter>",
        end,
        between="\n",
        before_json='" string="false">',
    )
    tail = rf"(?:\s|{end})*"
    head = rf'{tail}<｜DSML｜invoke name="(?P<name>[^"\n]+)">'
    return CallFormat(
        mark,
        last,
        head,
        '<｜DSML｜invoke name="',
        '">\n',
        parameters,
        tail=tail,
        marked="all",
        first="\n",
        between="\n",
        end="\n",
    )


def _gemma(mark: str, last: str, quote: str) -> CallFormat:
    return CallFormat(mark, last, r"\s*call:(?P<name>[^\s{]+)\s*(?=\{)", "call:", "", Bare(quote))


def _python(mark: str, last: str, first: str, between: str, end: str, **more: Any) -> CallFormat:
    return CallFormat(
        mark,
        last,
        r"[\s\[,]*(?P<name>[A-Za-z_][\w.-]*)\(",
        "",
        "(",
        Keywords(),
        after_arguments=")",
        tail=r"[\s\],]*",
        marked="all",
        first=first,
        between=between,
        end=end,
        **more,
    )


def _llama(mark: str, ends: str) -> CallFormat:
    """Returns the format of Llama's calls in JSON. ends: pattern of the tokens that end them."""
    return _of_objects(
        mark,
        "",
        key="parameters",
        marked="single",
        needs_mark=False,
        opens=rf"{re.escape(mark)}\s*|\A\s*(?=\{{\s*\"name\")",
        closes=rf"{ends}|\s*;\s*(?=\{{)",
    )


HERMES = _of_objects("<tool_call>", "</tool_call>", newline="\n", between="\n")
MISTRAL = _of_list("[TOOL_CALLS]", "", closes="</s>", ids="nine")
GRANITE = _of_list("<|tool_call|>", "", closes=r"<\|end_of_text\|>")
LLAMA = _llama(PYTHON_TAG, r"<\|eom_id\|>|<\|eot_id\|>")
LLAMA_4 = _llama("<|python_start|>", r"<\|python_end\|>|<\|eom\|>|<\|eot\|>")
# Calls of Llama 3.2 and 4 if their template asks for Python; the answer has only a list of calls.
PYTHONIC = _python(
    "<|python_start|>",
    "",
    "[",
    ", ",
    "]",
    needs_mark=False,
    opens=r"(?:\A\s*|<\|python_(?:start|tag)\|>\s*)(?=\[\s*[A-Za-z_][\w.-]*\()",
    closes=r"<\|python_end\|>|<\|eo[mt](?:_id)?\|>",
)
MISTRAL_11 = CallFormat(
    "[TOOL_CALLS]",
    "",
    r"\s*(?P<name>[^\s\[{<]+)\s*(?:\[CALL_ID\][^\[]*)?\[ARGS\]\s*(?=\{)",
    "",
    "[ARGS]",
    closes=r"(?=\[TOOL_CALLS\])|</s>",
    ids="nine",
)
QWEN_XML = CallFormat(
    "<tool_call>",
    "</tool_call>",
    r"(?:\s|</function>)*<function=(?P<name>[^>\n]+)>",
    "\n<function=",
    ">\n",
    Parameters("<parameter=", ">", "</parameter>", "</function>", between="\n", padding="\n"),
    after_arguments="\n",
    tail=r"(?:\s|</function>)*",
    between="\n",
    opens=r"\s*<tool_call>\s*(?=<function=)|\s*(?=<function=)",  # models may leave the mark out
)
MINIMAX = CallFormat(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    r'(?:\s|</invoke>)*<invoke name="(?P<name>[^"\n]+)">',
    '<invoke name="',
    '">\n',
    Parameters('<parameter name="', '">', "</parameter>", "</invoke>", between="\n"),
    after_arguments="\n",
    tail=r"(?:\s|</invoke>)*",
    marked="all",
    first="\n",
)
KIMI = CallFormat(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    r"(?:\s|<\|tool_call_end\|>)*<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^<]+?)(?::\d+)?)"
    r"\s*<\|tool_call_argument_begin\|>\s*(?=\{)",
    "<|tool_call_begin|>functions.",
    ":0<|tool_call_argument_begin|>",
    after_arguments="<|tool_call_end|>",
    tail=r"(?:\s|<\|tool_call_end\|>)*",
    marked="all",
    ids="counted",
)
KIMI_3 = CallFormat(
    # Text comes first, even if it is empty: its channel ends before the channel of calls begins.
    "<|close|>response<|sep|><|open|>tools<|sep|>",
    "<|close|>tools<|sep|><|close|>message<|sep|>",
    r'(?:\s|<\|close\|>call<\|sep\|>)*<\|open\|>call tool="(?P<name>[^"\n]+)"[^<]*<\|sep\|>',
    '<|open|>call tool="',
    '" index="0"<|sep|>',
    Parameters(
        '<|open|>argument key="',
        '" type="string"<|sep|>',
        "<|close|>argument<|sep|>",
        "<|close|>call<|sep|>",
        before_json='" type="{type}"<|sep|>',
        escapes_keys=True,
    ),
    tail=r"(?:\s|<\|close\|>call<\|sep\|>)*",
    marked="all",
    opens=r"\s*<\|open\|>tools<\|sep\|>",
    closes=r"<\|close\|>tools<\|sep\|>",
    after_text="<|close|>response<|sep|><|close|>message<|sep|>",
)
HARMONY = CallFormat(
    "<|channel|>commentary to=functions.",
    "",
    r"(?P<name>[^\s<]+)\s*(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>\s*(?=\{)",
    "",
    " <|constrain|>json<|message|>",
    marked="single",
    opens=r"(?:<\|channel\|>(?:commentary|analysis)\s+)?\bto=functions\.",
    closes=r"<\|call\|>|<\|end\|>",
    stop="<|call|>",
)
DEEPSEEK_3 = _deepseek(
    r"\s*function\s*<｜tool▁sep｜>(?P<name>[^\n<`]+?)\s*```json",
    "function<｜tool▁sep｜>",
    "\n```json\n",
    "\n```",
    "\n",
)
DEEPSEEK_31 = _deepseek(r"(?P<name>[^<]+?)\s*<｜tool▁sep｜>", "", "<｜tool▁sep｜>", "", "")
GEMMA_4 = _gemma("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _gemma("<start_function_call>", "<end_function_call>", "<escape>")

# Formats by texts in the chat template; the first row is taken whose texts all occur.
ROWS: tuple[tuple[tuple[str, ...], CallFormat | None], ...] = (
    (("<|channel|>", "<|call|>"), HARMONY),
    (("<|tool_call>", '<|"|>'), GEMMA_4),
    (("<start_function_call>", "<escape>"), FUNCTION_GEMMA),
    (("｜DSML｜", "function_calls>"), _dsml("function_calls")),
    (("｜DSML｜",), _dsml("tool_calls")),
    (("tool▁sep", "```json"), DEEPSEEK_3),
    (("tool▁sep",), DEEPSEEK_31),
    (("<|tool_calls_section_begin|>",), KIMI),
    (("<|open|>", "<|sep|>"), KIMI_3),
    (("<minimax:tool_call>",), MINIMAX),
    (("<arg_key>", "</arg_key><arg_value>"), _glm("")),
    (("<arg_key>",), _glm("\n")),
    (("<function=",), QWEN_XML),
    (("<function_calls>",), _python("<function_calls>", "</function_calls>", "\n", "\n", "\n")),
    (("<|tool_call_start|>",), _python("<|tool_call_start|>", "<|tool_call_end|>", "[", ", ", "]")),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_11),
    (("[ARGS]",), None),
    (("<tool_call>",), HERMES),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<|tool_call|>",), GRANITE),
    (("[func_name1(",), PYTHONIC),
    (("<|header_start|>", '"parameters": '), LLAMA_4),
    ((PYTHON_TAG,), LLAMA),
)


def found_in(source: str) -> CallFormat | None:
    """Returns the format of the family to which a chat template belongs; None: unknown."""
    return next((row for texts, row in ROWS if all(text in source for text in texts)), None)


# Arguments of a call, as response templates name them: for a single object, and for the items of a list.
WRITTEN: dict[str, tuple[str, Callable[..., CallFormat]]] = {
    "{content.arguments}": ("arguments", _of_objects),
    "{content.parameters}": ("parameters", _of_objects),
    "{arguments}": ("arguments", _of_list),
    "{parameters}": ("parameters", _of_list),
}


def of_response_template(calls: dict[str, Any]) -> CallFormat | None:
    """Returns the format that a response template's field of calls describes; None: not supported."""
    transform = calls.get("transform")
    written = transform.get("function", {}).get("arguments") if isinstance(transform, dict) else None
    opening, close = calls.get("open"), calls.get("close")
    has_marks = isinstance(opening, str) and isinstance(close, str)
    if calls.get("content") != "json" or not has_marks or written not in WRITTEN:
        return None
    key, make = WRITTEN[written]
    return make(opening, "" if make is _of_list else close, key)
