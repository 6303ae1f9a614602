"""Grammars of answers that call tools: only calls, or text in which every call is valid."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.api.openai.calls.argument_rules import ArgumentRules
from gateway.api.openai.calls.formats import HARMONY, CallFormat
from gateway.generation.form import Form, mark, up_to


class CallGrammar:
    """Makes the forms of answers in one format of calls."""

    def __init__(self, format_: CallFormat, added: Mapping[str, int], field: str) -> None:
        """
        Args:
            added: ids of added tokens by their text.
            field: name of the request's field that asks for a form.
        """
        self._format = format_
        self._added = added
        self._field = field

    def only_calls(self, tools: Sequence[dict[str, Any]], *, several: bool) -> Form:
        """Returns the form of an answer that has only calls to these tools.

        several: whether several calls are allowed, if the format allows them.

        Raises:
            InvalidRequestError: the format cannot express a tool's schema.
        """
        return Form("lark", f"start: {self._calls(several)}\n{self._rules(tools)}", "tools")

    def valid_calls(self, tools: Sequence[dict[str, Any]]) -> Form:
        """Returns the form of any text with calls to these tools in it, each valid by its schema.

        Raises:
            InvalidRequestError: the format cannot express a tool's schema.
        """
        written, begin = self._format, self._text(self._format.mark)
        calls = "call" if written.marked != "all" else self._between_marks(several=True)
        opened, rule = up_to(begin, "TEXT", "opened")
        rules = f"{self._rules(tools)}\n{rule}"
        if written is HARMONY:
            final, said = map(self._text, ("<|channel|>final<|message|>", "<|channel|>commentary<|message|>"))
            onward = self._text("<|end|><|start|>assistant")
            start = f"({said} TEXT {onward})? ({final} TEXT | {self._calls(several=False)})"
        elif not written.needs_mark:
            first = (written.first + written.before_name)[0]  # text that begins otherwise is no call
            start = f"NO_CALL ({begin} {calls})? | ({begin})? {calls}"
            rules += f"\nNO_CALL: /([^ \\t\\r\\n\\{first}](.|\\n)*)?/"
        elif written.marked == "all":
            ends = f"({self._text(written.after_text)})?" if written.after_text else ""
            start = f"TEXT {ends} | {opened} {calls}"
        elif written.last:
            start = "marked* rest"
            rules += f"\nmarked: {opened} call {self._text(written.last)}\nrest: TEXT"
        else:
            start = f"TEXT | {opened} call ({begin} call)*"
        return Form("lark", f"start: {start}\n{rules}", "tools", ends_itself=False)

    def _calls(self, several: bool) -> str:
        """Returns the expression of calls with their marks."""
        written = self._format
        begin, end = self._text(written.mark), self._text(written.last)
        if not written.needs_mark:
            begin = f"({begin})?"
        if written.marked == "all":
            return f"{begin} {self._between_marks(several)}"
        one = f"{begin} call {end}"
        if not several or written.marked == "single":
            return one
        return f"{one} ({self._text(written.between)} {one})*"

    def _between_marks(self, several: bool) -> str:
        """Returns the expression of calls between two marks, with the second mark."""
        written = self._format
        more = f" ({self._text(written.between)} call)*" if several else ""
        return f"{self._text(written.first)} call{more} {self._text(written.end + written.last)}"

    def _rules(self, tools: Sequence[dict[str, Any]]) -> str:
        """Returns the rules of a call of each tool."""
        written, calls = self._format, []
        rules = ArgumentRules(self._text, self._field)
        for index, tool in enumerate(tools):
            function = tool["function"]
            name = json.dumps(function["name"], ensure_ascii=False) if written.key else function["name"]
            begin, end = self._text(written.before_name), self._text(written.after_arguments)
            arguments = rules.of(written.arguments, function, f"args_{index}")
            named = f"{begin} {json.dumps(name, ensure_ascii=False)} {self._text(written.after_name)}"
            calls.append(f"call_{index}: {named} {arguments} {end}")
        names = " | ".join(f"call_{index}" for index in range(len(tools)))
        return "\n".join([f"call: {names}", *calls, *rules.lines])

    def _text(self, text: str) -> str:
        """Returns a fixed text in Lark's notation.

        A newline may be missing, since families differ in newlines between marks. 0 stands for any number.
        """
        parts = re.split("([\n0])", text)
        kinds = {"\n": '"\\n"?', "0": "NUMBER"}
        return " ".join(kinds[part] if part in kinds else mark(part, self._added) for part in parts if part)
