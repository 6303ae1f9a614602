"""Streaming readers of a call's arguments: each turns a model's notation into the text of a JSON object."""

import ast
import json
import re
from typing import Any, Protocol

from gateway.api.openai.calls.formats import Bare, Json, Keywords, Parameters

TYPES = {bool: "boolean", dict: "object", float: "number", int: "integer", list: "array", str: "string"}

CONSTANTS = {"true": True, "false": False, "null": None}  # as JSON names them
STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
TEXT_ALONE = frozenset({"string"})
PYTHON = {"True": "true", "False": "false", "None": "null"}  # Python's names, which models use now and then


class ArgumentsReader(Protocol):
    """Reader of the arguments of one call."""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Returns JSON text that is certain now, and the text after the arguments; None: incomplete."""

    def close(self) -> str:
        """Returns the rest of the JSON text, at the end of the call."""


def reader_of(written: Json | Parameters | Bare | Keywords, schema: dict[str, Any]) -> ArgumentsReader:
    """Returns a reader of arguments. schema: JSON schema of the tool's parameters."""
    match written:
        case Parameters():
            return ParametersReader(written, schema)
        case Bare():
            return BareReader(written.quote)
        case Keywords():
            return KeywordsReader()
    return JsonReader()


class JsonReader:
    """Reads a JSON object and returns it unchanged."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def feed(self, text: str) -> tuple[str, str | None]:
        """Returns the text up to the object's end, and the text after it; None: incomplete."""
        for place, char in enumerate(text):
            if self._in_string:
                ends = char == '"' and not self._is_escaped
                self._is_escaped = char == "\\" and not self._is_escaped
                self._in_string = not ends
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return text[: place + 1], text[place + 1 :]
        return text, None

    def close(self) -> str:
        """Returns an empty text: a truncated object stays truncated."""
        return ""


class ParametersReader:
    """Reads arguments between marks. Texts are streamed; other values come when they are complete."""

    def __init__(self, written: Parameters, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._written = written
        values = (written.before_value, *filter(None, [written.before_json]))
        before_value = "|".join(map(_loose, values)).replace(re.escape("{type}"), r"\w+")
        padding = "(?:\n|(?=[^\n]))" if written.padding else ""
        self._key = re.compile(
            rf"\s*{_loose(written.before_key)}(?P<key>[^<>\"\n]+?)(?P<kind>{before_value}){padding}",
            re.DOTALL,
        )
        self._text_kind = re.compile(_loose(written.before_value)) if written.before_json else None
        self._end = re.compile(rf"\s*{re.escape(written.end)}") if written.end else None
        self._marks = (written.padding + written.after_value, written.after_value)
        self._after_value = re.compile("|".join(map(re.escape, self._marks)))
        self._rest = ""  # text that is not certain yet
        self._begun = ""  # separator before the next key; empty: nothing was read yet
        self._types: frozenset[str] | None = None  # types of the current value; None: any
        self._searched = 0  # characters of the rest in which no mark begins
        self._is_inside = self._is_text = False  # whether a value is being read, and whether it is text

    def feed(self, text: str) -> tuple[str, str | None]:
        """Returns new JSON text, and the text after the arguments; None: incomplete."""
        self._rest += text
        made = "" if self._begun else "{"
        self._begun = self._begun or " "
        while True:
            if self._is_inside:
                piece = self._value()
                if piece is None:
                    return made + self._certain(), None
                made += piece
            elif self._end is not None and (ended := self._end.match(self._rest)):
                return made + "}", self._rest[ended.end() :]
            elif key := self._key.match(self._rest):
                made += self._begin(key)
            else:
                return made, None

    def close(self) -> str:
        """Returns the object's end, unless a value was truncated."""
        return "" if self._is_inside else ("}" if self._begun else "{}")

    def _begin(self, key: re.Match[str]) -> str:
        name = self._written.unescaped(key["key"])
        self._rest = self._rest[key.end() :]
        self._searched = 0
        self._types = types_of(_part(_part(self._schema, "properties"), name), self._schema)
        self._is_text = (
            self._types == TEXT_ALONE
            if self._text_kind is None
            else self._text_kind.fullmatch(key["kind"]) is not None
        )
        separator, self._begun = ("", ", ") if self._begun == " " else (self._begun, self._begun)
        self._is_inside = True
        return f"{separator}{json.dumps(name, ensure_ascii=False)}: " + ('"' if self._is_text else "")

    def _value(self) -> str | None:
        """Returns the end of the value; None: it is incomplete."""
        ended = self._after_value.search(self._rest, self._searched)
        if ended is None:
            self._searched = max(len(self._rest) - len(self._marks[0]), 0)
            return None
        value, self._rest = self._rest[: ended.start()], self._rest[ended.end() :]
        self._is_inside = False
        return f'{escaped(value)}"' if self._is_text else self._as_json(value)

    def _certain(self) -> str:
        """Returns the part of a text that cannot belong to the mark after it."""
        if not self._is_text:
            return ""
        ends = len(self._rest) - held(self._rest, self._marks)
        made, self._rest, self._searched = escaped(self._rest[:ends]), self._rest[ends:], 0
        return made

    def _as_json(self, value: str) -> str:
        """Returns the value unchanged if it is JSON of a type in the schema, else as a JSON string."""
        words = value.strip()
        if self._types is None or self._types & {"boolean", "null"}:
            words = PYTHON.get(words, words)
        try:
            made = json.loads(words, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return json.dumps(value, ensure_ascii=False)
        kind = TYPES.get(type(made), "null")
        kinds = {kind, "number"} if kind == "integer" else {kind}
        if kind == "number" and isinstance(made, float) and made.is_integer():
            kinds.add("integer")
        is_known = self._types is None or bool(self._types & kinds)
        return words if is_known else json.dumps(value, ensure_ascii=False)


class BareReader:
    """Reads an object with unquoted keys and with marks around texts."""

    WORD = re.compile(r"[^\s,:{}\[\]<]+(?=[\s,:{}\[\]<])")

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._rest = ""
        self._depth = 0
        self._in_text = False

    def feed(self, text: str) -> tuple[str, str | None]:
        """Returns new JSON text, and the text after the object; None: incomplete."""
        self._rest += text
        made = ""
        while self._rest:
            if self._in_text:
                words, mark, rest = self._rest.partition(self._quote)
                if not mark:
                    ends = len(words) - held(words, (self._quote,))
                    made, self._rest = made + escaped(words[:ends]), words[ends:]
                    break
                made, self._rest, self._in_text = f'{made}{escaped(words)}"', rest, False
            elif self._rest.startswith(self._quote):
                made, self._rest, self._in_text = made + '"', self._rest.removeprefix(self._quote), True
            elif self._quote.startswith(self._rest):
                break
            elif word := self.WORD.match(self._rest):
                made, self._rest = made + self._word(word), self._rest[word.end() :]
            elif (char := self._rest[0]) in "{}[],: \n\t\r<":
                self._rest = self._rest[1:]
                self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(char, 0)
                made += char + " " * (char in ",:")
                if self._depth == 0:
                    return made, self._rest
            else:
                break  # a word that may continue
        return made, None

    def close(self) -> str:
        """Returns an empty text: a truncated object stays truncated."""
        return ""

    def _word(self, word: re.Match[str]) -> str:
        is_key = self._rest[word.end() :].lstrip().startswith(":")
        return json.dumps(word[0], ensure_ascii=False) if is_key else PYTHON.get(word[0], word[0])


class KeywordsReader:
    """Reads keyword arguments of Python, and returns them when they are complete."""

    # Complete strings, incomplete strings, and brackets.
    PARTS = re.compile(rf"{STRING.pattern}|(?P<open>['\"].*)|[()\[\]{{}}]", re.DOTALL)

    def __init__(self) -> None:
        self._text = ""
        self._read = 0  # characters that were read
        self._depth = 1  # open brackets

    def feed(self, text: str) -> tuple[str, str | None]:
        """Returns the whole JSON object, and the text after the parenthesis; None: incomplete."""
        self._text += text
        for found in self.PARTS.finditer(self._text, self._read):
            if found["open"]:
                break
            self._read = found.end()
            self._depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(found[0], 0)
            if self._depth == 0:
                return _of_keywords(self._text[: found.start()]), self._text[found.end() :]
        return "", None

    def close(self) -> str:
        """Returns the text of truncated keywords."""
        return self._text


def _of_keywords(text: str) -> str:
    """Returns keywords as a JSON object; text that is no valid Python is unchanged: the caller sees it."""
    try:
        call = ast.parse(f"f({STRING.sub(_in_python, text)})", mode="eval").body
        assert isinstance(call, ast.Call)
        values = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
        if call.args or None in values:
            return text
        made = json.dumps(values, ensure_ascii=False, allow_nan=False)
        return made.encode(errors="replace").decode()  # a string may contain a lone surrogate
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def _in_python(text: re.Match[str]) -> str:
    """Returns a JSON string as a Python literal: some escapes of JSON have another meaning in Python."""
    try:
        return repr(json.loads(text[0]))
    except ValueError:
        return text[0]


def _literal(node: ast.expr) -> Any:
    """Returns the value of a literal of Python or JSON. Raises ValueError."""
    match node:
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            pairs = zip(keys, values, strict=True)
            return {str(ast.literal_eval(key)): _literal(value) for key, value in pairs if key is not None}
    return ast.literal_eval(node)


def types_of(schema: Any, root: dict[str, Any]) -> frozenset[str] | None:
    """Returns the JSON types that a schema allows; None: any. root: schema that resolves references."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict):
        return None
    if isinstance(declared := schema.get("type"), str | list):
        return frozenset([declared] if isinstance(declared, str) else map(str, declared))
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values:
        return frozenset(TYPES.get(type(value), "null") for value in values)
    for name in ("anyOf", "oneOf"):
        if isinstance(given := schema.get(name), list) and given:
            variants = [types_of(variant, root) for variant in given]
            known = [types for types in variants if types is not None]
            return frozenset().union(*known) if len(known) == len(variants) else None
    # A schema without constraints counts as text, which models write most often.
    return None if schema.keys() & {"allOf", "$ref", "not", "if"} else TEXT_ALONE


def resolved(schema: Any, root: dict[str, Any]) -> Any:
    """Returns the schema that a reference to the root's definitions means, and other schemas unchanged."""
    for _ in range(8):  # steps, since references may be circular
        reference = schema.get("$ref") if isinstance(schema, dict) and len(schema) == 1 else None
        _, kind, name = [*str(reference).split("/"), "", ""][:3]
        found = _part(_part(root, kind), name) if kind in ("$defs", "definitions") else {}
        if not found:
            return schema
        schema = found
    return schema


def _part(schema: Any, word: str) -> Any:
    """Returns the value of a schema's keyword; an empty schema if there is no such value or no schema."""
    return schema.get(word, {}) if isinstance(schema, dict) else {}


def held(text: str, marks: tuple[str, ...]) -> int:
    """Returns how many characters at the end of the text may be the beginning of a mark."""
    longest = max(map(len, marks)) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((length for length in lengths if any(mark.startswith(text[-length:]) for mark in marks)), 0)


def escaped(text: str) -> str:
    """Returns the text with the escapes of a JSON string, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _loose(text: str) -> str:
    """Returns a pattern of the text in which any amount of whitespace, or none, stands for whitespace."""
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+", text))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
