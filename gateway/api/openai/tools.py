"""Tools that a chat offers, and calls of them that are sent back."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from gateway.api.openai.schemas import NullIsLeftOut, Text

MAX_TOOLS, MAX_CALLS = 128, 128  # tools of a chat, calls of a message

Name = Annotated[Text, Field(min_length=1, max_length=64)]


class Function(NullIsLeftOut):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    description: Text = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False  # its arguments follow the schema, whatever the model would write


class Tool(NullIsLeftOut):
    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """Returns the tool as chat templates take it."""
        function = self.function
        named = {"name": function.name, "description": function.description}
        return {"type": self.type, "function": {**named, "parameters": function.parameters}}

    def held(self) -> dict[str, Any]:
        """The same, with no more in its parameters than its calls are held to."""
        if self.function.strict:
            return self.plain()
        return {"function": {"name": self.function.name, "parameters": {"type": "object"}}}


class FunctionName(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name


class NamedChoice(BaseModel):
    """Names the one tool that must be called."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["function"]
    function: FunctionName


class PastCallFunction(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

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
    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Text
    type: Literal["function"] = "function"
    function: PastCallFunction
    index: int | None = None  # index in a stream's deltas, if the caller put them together

    def plain(self) -> dict[str, Any]:
        """Returns the call as chat templates take it: arguments as an object."""
        arguments = json.loads(self.function.arguments or "{}")
        return {
            "id": self.id,
            "type": self.type,
            "function": {"name": self.function.name, "arguments": arguments},
        }
