"""Fields that request the form of an answer: OpenAI's and vLLM's."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gateway.api.openai.field_types import Label, NullIsLeftOut, Text
from gateway.errors import InvalidRequestError
from gateway.generation.form import MAX_CHOICES, Form, choice, json_object, json_schema


class JsonSchema(NullIsLeftOut):
    name: Label = ""  # accepted, not used
    description: Text | None = None  # accepted, not used
    strict: bool = True  # accepted: every answer follows its schema
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(NullIsLeftOut):
    """OpenAI's field ``response_format``."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None
    # Schema of a JSON object, as in llama.cpp and in services of open models.
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type 'json_schema', which needs it")
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError("schema belongs to the type 'json_object'")
        return self

    def form(self) -> Form | None:
        """Returns the form; None: any form."""
        if self.json_schema is not None:
            return json_schema(json.dumps(self.json_schema.schema_), "response_format.json_schema.schema")
        if self.schema_ is not None:
            return json_schema(json.dumps({"type": "object", **self.schema_}), "response_format.schema")
        return json_object("response_format") if self.type == "json_object" else None


class StructuredOutputs(NullIsLeftOut):
    """vLLM's field ``structured_outputs``, which has exactly one field itself."""

    json_: dict[str, Any] | Text | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = None
    grammar: Text | None = None  # in Lark

    @model_validator(mode="after")
    def _is_one(self) -> "StructuredOutputs":
        if len(self.model_fields_set) != 1:
            raise ValueError("exactly one of json, json_object, regex, choice and grammar is accepted")
        return self

    def form(self) -> Form:
        """Returns the form. Raises InvalidRequestError."""
        if self.regex is not None:
            return Form("regex", self.regex, "structured_outputs.regex")
        if self.grammar is not None:
            return Form("lark", self.grammar, "structured_outputs.grammar")
        if self.choice is not None:
            return choice(self.choice, "structured_outputs.choice")
        if self.json_ is not None:
            schema = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)
            return json_schema(schema, "structured_outputs.json")
        return json_object("structured_outputs.json_object")


def form_of(response_format: ResponseFormat, structured_outputs: StructuredOutputs | None) -> Form | None:
    """Returns the form that a request asks for in either of two fields. Raises InvalidRequestError."""
    form = response_format.form()
    if structured_outputs is None:
        return form
    if form is not None:
        raise InvalidRequestError("structured_outputs", "cannot be combined with response_format")
    return structured_outputs.form()
