"""Grammars of answers that call tools: nothing but calls, or text in which every call is right."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.api.openai.response_template import CALLS
from gateway.errors import InvalidRequestError
from gateway.generation.form import Form, mark

ARGUMENTS = {"{content.arguments}": "arguments", "{content.parameters}": "parameters"}
# Written on one line, as chat templates write what was called before.
ON_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class CallFormat:
    """How a model writes a call: an object between two marks, with its name first."""

    opening: str
    close: str
    arguments: str  # their key
    added: Mapping[str, int]  # ids of tokens that the tokenizer never makes of other text

    @classmethod
    def of(cls, template: dict[str, Any], added: Mapping[str, int], field: str) -> "CallFormat":
        """Raises InvalidRequestError for a format that is none of these, naming the request's field."""
        calls = template["fields"][CALLS]
        opening, close, transform = calls.get("open"), calls.get("close"), calls.get("transform")
        written = transform.get("function", {}).get("arguments") if isinstance(transform, dict) else None
        is_plain = calls.get("content") == "json" and isinstance(opening, str) and isinstance(close, str)
        if not is_plain or written not in ARGUMENTS:
            raise InvalidRequestError(field, "calls cannot be held to a form, as this model writes them")
        return cls(opening, close, ARGUMENTS[written], added)

    def only_calls(self, tools: Sequence[dict[str, Any]], *, several: bool) -> Form:
        """Of these tools; ``several``: one or more."""
        calls = f"start: call{'+' if several else ''}\ncall: {mark(self.opening, self.added)} body"
        return Form("lark", f"{calls}\n{self._bodies(tools)}", "tools")

    def right_calls(self, tools: Sequence[dict[str, Any]]) -> Form:
        """Any text, and in it calls of these tools, each by its schema."""
        if self.opening in self.added:
            call = f"call: TEXT {mark(self.opening, self.added)} body"
        else:
            call = f"opened[lazy]: TEXT {json.dumps(self.opening)}\ncall: opened body"
        lines = ["start: call* rest", "rest: TEXT", "TEXT: /(.|\\n)*/", call, self._bodies(tools)]
        return Form("lark", "\n".join(lines), "tools")

    def _bodies(self, tools: Sequence[dict[str, Any]]) -> str:
        functions = [tool["function"] for tool in tools]
        rules = [
            f"body_{index}: {json.dumps(self._head(function))} %json {_schema(function)}"
            f' "}}" {mark(self.close, self.added)}'
            for index, function in enumerate(functions)
        ]
        return "\n".join(["body: " + " | ".join(f"body_{index}" for index in range(len(rules))), *rules])

    def _head(self, function: dict[str, Any]) -> str:
        return f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{self.arguments}": '


def _schema(function: dict[str, Any]) -> str:
    return json.dumps({**function["parameters"], "x-guidance": ON_ONE_LINE})
