"""Grammars of answers that call tools: calls alone, or text in which every call is valid."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.api.openai.response_template import CALLS, FORMATS, LLAMA
from gateway.errors import InvalidRequestError
from gateway.generation.form import Form, mark

ARGUMENTS = {
    "{content.arguments}": "arguments",
    "{content.parameters}": "parameters",
    "{arguments}": "arguments",  # format of each call in a list
}
# Format of calls on one line, as chat templates write earlier calls.
ON_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
TEXT = "TEXT: /(.|\\n)*/"
NO_CALL = "NO_CALL: /([^ \\t\\r\\n{](.|\\n)*)?/"  # text that does not begin like a call


@dataclass(frozen=True)
class CallFormat:
    """Format of a call: a mark, then an object with the name first."""

    opening: str
    close: str | None  # mark behind each call; None: the answer ends there
    arguments: str  # key of the arguments
    added: Mapping[str, int]  # ids of tokens that stand for exactly their text
    is_listed: bool  # calls are the items of one list behind the mark

    @classmethod
    def of(cls, template: dict[str, Any], added: Mapping[str, int], field: str) -> "CallFormat":
        """Returns the format. Raises InvalidRequestError, naming the field, if no grammar can follow it."""
        calls = template["fields"][CALLS]
        transform, is_listed = calls.get("transform"), calls.get("transform_each", False)
        written = transform.get("function", {}).get("arguments") if isinstance(transform, dict) else None
        is_bare = calls == FORMATS[LLAMA]
        opening, close = LLAMA if is_bare else calls.get("open"), calls.get("close")
        has_marks = isinstance(opening, str) and (is_bare or isinstance(close, str))
        if calls.get("content") != "json" or not has_marks or written not in ARGUMENTS:
            raise InvalidRequestError(field, "calls cannot be held to a form, as this model writes them")
        return cls(opening, None if is_listed else close, ARGUMENTS[written], added, is_listed)

    @property
    def _mark(self) -> str:
        return mark(self.opening, self.added)

    def only_calls(self, tools: Sequence[dict[str, Any]], *, several: bool) -> Form:
        """Returns the form of calls to these tools. several: more than one, if the format allows it."""
        if self.is_listed:
            start = f"start: {self._mark} {_list(several)}"
        elif self.close is None:
            start = f"start: {self._mark}? body"
        else:
            start = f"start: call{'+' if several else ''}\ncall: {self._mark} body"
        return Form("lark", f"{start}\n{self._bodies(tools)}", "tools")

    def valid_calls(self, tools: Sequence[dict[str, Any]]) -> Form:
        """Returns the form of any text with calls of these tools in it, each by its schema."""
        opened = f"TEXT {self._mark}"
        lines = [TEXT, self._bodies(tools)]
        if self.opening not in self.added:
            lines.append(f"opened[lazy]: {opened}")
            opened = "opened"
        if self.is_listed:
            start = f"start: TEXT | {opened} {_list(several=True)}"
        elif self.close is None:
            start = f"start: NO_CALL ({self._mark} body)? | {self._mark}? body\n{NO_CALL}"
        else:
            start = f"start: call* rest\nrest: TEXT\ncall: {opened} body"
        return Form("lark", "\n".join([start, *lines]), "tools", ends_itself=False)

    def _bodies(self, tools: Sequence[dict[str, Any]]) -> str:
        functions = [tool["function"] for tool in tools]
        close = "" if self.close is None else f" {mark(self.close, self.added)}"
        rules = [
            f'body_{index}: {json.dumps(self._head(function))} %json {_schema(function)} "}}"{close}'
            for index, function in enumerate(functions)
        ]
        return "\n".join(["body: " + " | ".join(f"body_{index}" for index in range(len(rules))), *rules])

    def _head(self, function: dict[str, Any]) -> str:
        return f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{self.arguments}": '


def _list(several: bool) -> str:
    return '"[" body (", " body)* "]"' if several else '"[" body "]"'


def _schema(function: dict[str, Any]) -> str:
    return json.dumps({**function["parameters"], "x-guidance": ON_ONE_LINE})
