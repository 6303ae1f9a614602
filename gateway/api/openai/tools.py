"""Tools that a chat offers, and past calls of tools that callers send back."""

import json
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from gateway.api.openai.field_types import NullIsLeftOut, Strict, Text
from gateway.errors import InvalidRequestError

MAX_TOOLS, MAX_CALLS = 512, 128  # tools of a chat, calls of a message

Name = Annotated[Text, Field(min_length=1, max_length=128)]


class Function(NullIsLeftOut):
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False  # whether arguments must follow the schema


class Tool(NullIsLeftOut):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """Returns the tool in the form that chat templates accept."""
        function = self.function
        named = function.model_dump(include={"name", "description"}, exclude_none=True)
        return {"type": self.type, "function": {**named, "parameters": function.parameters}}

    def held(self) -> dict[str, Any]:
        """Returns the tool with the schema that its calls must follow: any object if it is not strict."""
        if self.function.strict:
            return self.plain()
        return {"function": {"name": self.function.name, "parameters": {"type": "object"}}}


class FunctionName(Strict):
    name: Name


class NamedChoice(Strict):
    """Name of the tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: list[NamedChoice] = Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)


class AllowedChoice(Strict):
    """Names of the tools that may be called, of those that are offered."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    def names(self, offered: Collection[str]) -> frozenset[str]:
        """Returns the names. Raises InvalidRequestError for a name that is not offered."""
        names = frozenset(tool.function.name for tool in self.allowed_tools.tools)
        if wrong := min(names - {*offered}, default=None):
            raise InvalidRequestError("tool_choice.allowed_tools.tools", f"{wrong!r} is none of the tools")
        return names


class PastCallFunction(Strict):
    name: Name
    arguments: Text

    @field_validator("arguments")
    @classmethod
    def _are_an_object(cls, arguments: str) -> str:
        try:
            is_object = isinstance(json.loads(arguments or "{}"), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise ValueError("the text of a JSON object is accepted")
        return arguments


class Call(NullIsLeftOut):
    id: Text
    type: Literal["function"] = "function"
    function: PastCallFunction
    index: int | None = None  # index among a stream's deltas, which callers may send back

    def plain(self) -> dict[str, Any]:
        """Returns the call for chat templates, except that its arguments are JSON text."""
        function = {"name": self.function.name, "arguments": self.function.arguments or "{}"}
        return {"id": self.id, "type": self.type, "function": function}
