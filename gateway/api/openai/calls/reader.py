"""Streaming reader of a model's calls, between the marks of their format."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.api.openai.calls.arguments import ArgumentsReader, reader_of
from gateway.api.openai.calls.formats import CallFormat


@dataclass(frozen=True)
class Begun:
    """Beginning of a call, whose arguments follow."""

    name: str
    id: str | None  # id that the model wrote; None: it wrote none


class CallReader:
    """Reads the text between the marks, in pieces of any size. Names come at once, arguments are streamed."""

    def __init__(self, format_: CallFormat, schemas: Mapping[str, dict[str, Any]]) -> None:
        """schemas: JSON schemas of the parameters by the tool's name."""
        self._format = format_
        self._schemas = schemas
        self._head = re.compile(format_.head, re.DOTALL)
        self._tail = re.compile(format_.tail)
        self._arguments: ArgumentsReader | None = None
        self._rest = ""  # text that is not read yet
        self.calls = 0  # number of calls that have begun

    def feed(self, text: str) -> Iterator[Begun | str]:
        """Yields the beginnings of calls, and after each its arguments as pieces of a JSON object."""
        self._rest += text
        while self._rest:
            if self._arguments is None:
                head = self._head.match(self._rest)
                begun = None if head is None else _begun(head)
                if head is None or begun is None:
                    return
                self._rest = self._rest[head.end() :]
                self._arguments = reader_of(self._format.arguments, self._schemas.get(begun.name, {}))
                self.calls += 1
                yield begun
            made, rest = self._arguments.feed(self._rest)
            self._rest = rest or ""
            if made:
                yield made
            if rest is None:
                return
            self._arguments = None

    def close(self) -> Iterator[Begun | str]:
        """Yields the rest, at the end of the text."""
        if self._arguments is not None:
            if made := self._arguments.close():
                yield made
            self._arguments, self._rest = None, ""
        elif self._format.alone and (head := re.fullmatch(self._format.alone, self._rest)):
            self.calls, self._rest = self.calls + 1, ""
            yield Begun(head["name"], None)
            yield "{}"

    @property
    def unread(self) -> str:
        """Text that is no call in the format."""
        return "" if self._arguments is not None or self._tail.fullmatch(self._rest) else self._rest


def _begun(head: re.Match[str]) -> Begun | None:
    """Returns the call that begins; None: its name is not a JSON string."""
    groups = head.groupdict()
    if "quoted" not in groups:
        return Begun(head["name"].strip(), groups.get("id"))
    try:
        return Begun(json.loads(head["quoted"], strict=False), None)
    except ValueError:  # an escape that JSON does not have
        return None
