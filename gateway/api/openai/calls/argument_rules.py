"""Grammar rules for the arguments of a call, in each notation of the model families."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gateway.api.openai.calls.arguments import TEXT_ALONE, resolved, types_of
from gateway.api.openai.calls.formats import Bare, Json, Keywords, Parameters
from gateway.errors import InvalidRequestError
from gateway.generation.form import up_to
from gateway.generation.json_schemas import AS_WRITTEN, fitted

TERMINALS = ("TEXT: /(.|\\n)*/", "KEY: /[A-Za-z_][A-Za-z0-9_.-]*/", "NUMBER: /[0-9]+/")
SAID = {"title", "description", "$schema", "default", "examples", "$comment", "format", "nullable"}
OBJECT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
TEXTUAL = {"type", "enum", "const", "pattern", "minLength", "maxLength"}
NOT_TEXT = frozenset({"array", "boolean", "null", "number", "object"})  # JSON types other than string
DEEPEST = 16  # levels of nested objects and lists in a grammar that is built here


class ArgumentRules:
    """Collects the grammar rules of the arguments of all tools."""

    def __init__(self, text: Callable[[str], str], field: str) -> None:
        """
        Args:
            text: returns a fixed text in Lark's notation.
            field: name of the request's field that asks for a form.
        """
        self._text = text
        self._field = field
        self.lines = [*TERMINALS]

    def of(self, written: Json | Parameters | Bare | Keywords, function: dict[str, Any], name: str) -> str:
        """Returns the expression of a function's arguments. name: unused name, for its rules.

        Raises:
            InvalidRequestError: the notation of the family cannot enforce the schema of the arguments.
        """
        schema = function["parameters"]
        try:
            match written:
                case Json():
                    return _json(schema, schema)
                case Parameters():
                    return self._parameters(written, schema, name)
                case Bare():
                    return _BareRules(self._text(written.quote), self.lines, schema).value(schema, name)
                case Keywords():
                    return self._keywords(schema, name)
        except _UnreadError as unread:
            raise InvalidRequestError(
                self._field,
                f"the tool {function['name']!r} cannot be held to {unread}, as this model writes arguments",
            ) from None
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # Keywords of a schema may have any value, and here they are read before they are compiled.
            reason = f"the schema of the tool {function['name']!r} is no JSON schema: {error}"
            raise InvalidRequestError(self._field, reason) from error

    def _parameters(self, written: Parameters, schema: dict[str, Any], name: str) -> str:
        _check(schema, OBJECT)
        properties, required = schema.get("properties", {}), schema.get("required", ())
        begin, end = self._text(written.before_key), self._text(written.end)
        between = self._text(written.between)
        if not properties:
            self.lines.append(f"{name}_any: {begin} KEY {self._free(written, name)} {between}")
            return f"{name}_any* {end}"
        for index, (key, value) in enumerate(properties.items()):
            place = f"{name}_{index}"
            values = " | ".join(self._values(written, value, schema, place))
            self.lines.append(f"{place}: {begin} {quoted(written.escaped(key))} ({values}) {between}")
        parts = [f"{name}_{index}" + "?" * (key not in required) for index, key in enumerate(properties)]
        return f"{' '.join(parts)} {end}"

    def _keywords(self, schema: dict[str, Any], name: str) -> str:
        _check(schema, OBJECT)
        properties, required = schema.get("properties", {}), schema.get("required", ())
        if not properties:
            self.lines.append(f'{name}_any: KEY "=" {_json({}, schema)}')
            return f'({name}_any (", " {name}_any)*)?'
        members = [
            (f"{quoted(key + '=')} {_json(value, schema)}", key in required)
            for key, value in properties.items()
        ]
        return _listed(members, '", "', name, self.lines)

    def _free(self, written: Parameters, name: str) -> str:
        """Returns the expression of a value of any type, with its marks."""
        before = " | ".join([self._text(written.before_value), *self._before_json(written, NOT_TEXT)])
        return f"({before}) {_newline(written)} {self._up_to_mark(written, 'TEXT', f'{name}_free')}"

    def _values(self, written: Parameters, schema: Any, root: dict[str, Any], name: str) -> Iterator[str]:
        """Yields the alternatives of a value, each with its marks: text unquoted, other values as JSON."""
        padding = _newline(written)
        for number, variant in enumerate(_variants(schema, root)):
            types = types_of(variant, root)
            before = self._text(written.before_value)
            if types != TEXT_ALONE:
                before = " | ".join(self._before_json(written, _kinds(types))) or before
                value = f"{padding} {_json(variant, root)} {padding}"
                yield f"({before}) {value} {self._text(written.after_value)}"
                continue
            begin = f"{before} {padding}"
            variant = variant if isinstance(variant, dict) else {}
            _check(variant, TEXTUAL)
            if (choices := _choices(variant)) is not None:
                words = " | ".join(map(quoted, choices))
                yield f"{begin} ({words}) {padding} {self._text(written.after_value)}"
            else:
                yield f"{begin} {self._up_to_mark(written, _pattern(variant), f'{name}_text_{number}')}"

    def _before_json(self, written: Parameters, kinds: frozenset[str]) -> list[str]:
        """Returns the marks before a JSON value of these types; none if they equal the mark before a text."""
        texts = {written.before_json.replace("{type}", kind) for kind in kinds}
        return [self._text(text) for text in sorted(texts) if text]

    def _up_to_mark(self, written: Parameters, pattern: str, name: str) -> str:
        """Returns the expression of text of a pattern up to the mark after a value."""
        text, rule = up_to(f"{_newline(written)} {self._text(written.after_value)}", pattern, name)
        self.lines.append(rule)
        return text


class _BareRules:
    """Grammar rules of objects with unquoted, sorted keys and with marks around texts."""

    def __init__(self, quote: str, lines: list[str], root: dict[str, Any]) -> None:
        """
        Args:
            quote: mark around texts, in Lark's notation.
            lines: list that rules are added to.
            root: schema in which references are resolved.
        """
        self._lines = lines
        self._quote = quote
        self._root = root
        text, rule = up_to(quote, "TEXT", "text_end")
        common = [
            rule,
            f"any_text: {quote} {text}",
            'any: any_text | "true" | "false" | "null" | number | any_object | "[" (any ("," any)*)? "]"',
            'number: %json {"type": "number"}',
            'any_object: "{" (KEY ":" any ("," KEY ":" any)*)? "}"',
        ]
        lines += [line for line in common if line not in lines]

    def value(self, schema: Any, name: str, depth: int = 0) -> str:
        """Returns the name of the rule of a value. Raises _UnreadError."""
        if depth > DEEPEST:
            raise _UnreadError(f"more than {DEEPEST} levels")
        variants = _variants(schema, self._root)
        kinds = [self._kind(variant, f"{name}_{at}", depth) for at, variant in enumerate(variants)]
        self._lines.append(f"{name}: {' | '.join(kinds)}")
        return name

    def _kind(self, schema: Any, name: str, depth: int) -> str:
        if not isinstance(schema, dict) or not schema.keys() - SAID:
            return "any"
        if (values := _choices(schema)) is not None:
            return " | ".join(self._literal(value) for value in values)
        kind = schema.get("type", "object" if "properties" in schema else "string")
        if kind == "object":
            _check(schema, OBJECT)
            return self._object(schema, name, depth)
        if kind == "array":
            _check(schema, {"type", "items"})
            item = self.value(schema.get("items", True), f"{name}_item", depth + 1)
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "string":
            _check(schema, {"type"})
            return "any_text"
        return _json(schema, self._root)

    def _object(self, schema: dict[str, Any], name: str, depth: int) -> str:
        """Returns the expression of an object: members in the order of their keys, commas between them."""
        properties = schema.get("properties", {})
        if not properties:
            return "any_object"
        members = [
            (
                f"{quoted(key + ':')} {self.value(properties[key], f'{name}_{index}', depth + 1)}",
                key in schema.get("required", ()),
            )
            for index, key in enumerate(sorted(properties, key=lambda key: (key.lower(), key)))
        ]
        return f'"{{" {_listed(members, quoted(","), name, self._lines)} "}}"'

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {quoted(value)} {self._quote}"
        return quoted(json.dumps(value))


class _UnreadError(ValueError):
    """Raised for a part of a schema that the grammar of a family cannot express."""


def _listed(members: Sequence[tuple[str, bool]], separator: str, name: str, lines: list[str]) -> str:
    """Returns the expression of members in their order, with separators between present members.

    Args:
        members: expressions of the members, each with whether it is required.
        name: unused name for rules, which are added to the lines.
    """
    rest, whole = '""', '""'  # members after the present member, and members from it on
    for index, (member, is_needed) in reversed([*enumerate(members)]):
        behind = f"{name}_{index}_rest"
        lines.append(f"{behind}: {rest}")
        present = f"{member} {behind}"
        rest = f"{separator} {present}" + ("" if is_needed else f" | {behind}")
        whole = present if is_needed else f"{present} | {whole}"
    return f"({whole})"


def _kinds(types: frozenset[str] | None) -> frozenset[str]:
    """Returns the types of values other than text, as marks name them; all if the schema has no type."""
    named = {"number" if kind == "integer" else kind for kind in types or ()}
    return frozenset(named & NOT_TEXT) or NOT_TEXT


def _newline(written: Parameters) -> str:
    """Returns the newline next to each value. It is required, as it could belong to the value otherwise."""
    return quoted(written.padding) if written.padding else ""


def _check(schema: dict[str, Any], known: set[str]) -> None:
    """Raises _UnreadError if the schema has unknown keywords."""
    if odd := sorted(schema.keys() - known - SAID):
        raise _UnreadError(f"its schema's {', '.join(odd)}")


def _variants(schema: Any, root: dict[str, Any]) -> list[Any]:
    """Returns the alternatives of a schema, without references, unions and lists of types."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict):
        return [schema]
    if (values := _choices(schema)) is not None:
        texts = [value for value in values if isinstance(value, str)]
        others = [value for value in values if not isinstance(value, str)]
        return [{"enum": each} for each in (texts, others) if each]
    for name in ("anyOf", "oneOf"):
        if name in schema and not schema.keys() - {name} - SAID:
            return [each for variant in schema[name] for each in _variants(variant, root)]
    if isinstance(kinds := schema.get("type"), list):
        return [{**schema, "type": kind} for kind in kinds]
    return [schema]


def _choices(schema: dict[str, Any]) -> list[Any] | None:
    """Returns the values that const or enum allows; None: the schema has neither."""
    if "const" in schema:
        return [schema["const"]]
    values: list[Any] | None = schema.get("enum")
    return values


def _pattern(schema: dict[str, Any]) -> str:
    """Returns the pattern of a text, in Lark's notation. Raises _UnreadError."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if "pattern" in schema:
        if least or most is not None:
            raise _UnreadError("a pattern and a length together")
        # In JSON Schema a pattern may match anywhere in a text, unless it is anchored.
        found = schema["pattern"].replace("/", "\\/")
        before = "" if found.startswith("^") else "(.|\\n)*"
        behind = "" if found.endswith("$") else "(.|\\n)*"
        return f"/{before}({found.removeprefix('^').removesuffix('$')}){behind}/"
    if least or most is not None:
        return f"/(.|\\n){{{least},{'' if most is None else most}}}/"
    return "TEXT"


def _json(schema: Any, root: dict[str, Any]) -> str:
    """Returns the expression of a value in JSON, with the definitions that its schema may refer to."""
    if not isinstance(schema, dict):
        schema = {}
    known = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return f"%json {json.dumps({**fitted({**known, **schema}), 'x-guidance': AS_WRITTEN})}"


def quoted(text: str) -> str:
    """Returns a text in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)
