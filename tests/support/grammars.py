"""Grammars over the demo pair's vocabulary."""

import json
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from gateway.generation.form import Form
from outrider.decoding.grammar import Matcher, compiled, token_table
from outrider.demo.prompts import DEMO

VOCAB_SIZE = 2048
ENDS = frozenset([0, 5])
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "reddish"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def json_grammar(schema: Any) -> str:
    return Form("json_schema", json.dumps(schema), "").grammar()


def regex_grammar(regex: str) -> str:
    return LLMatcher.grammar_from_regex(regex)


def lark_grammar(lark: str) -> str:
    return LLMatcher.grammar_from_lark(lark)


# Free text like thinking, then a mark, which may be anywhere in a Draft, then an object.
THINKING = lark_grammar(
    'start: /[a-z ]*/ "</think>" answer\nanswer: %json ' + json.dumps({"const": {"value": 7, "unit": "km"}})
)
GRAMMARS = {
    "object": json_grammar({"type": "object"}),
    "person": json_grammar(PERSON),
    "recursive": json_grammar(
        {
            "$ref": "#/$defs/n",
            "$defs": {
                "n": {
                    "type": "object",
                    "properties": {
                        "v": {"type": ["string", "null"]},
                        "c": {"type": "array", "items": {"$ref": "#/$defs/n"}},
                    },
                    "required": ["v", "c"],
                }
            },
        }
    ),
    "spaces": LLMatcher.grammar_from_json_schema({"type": "object"}),
    "unicode": json_grammar({"anyOf": [{"const": "é🏇"}, {"type": "string", "pattern": "^[a-f]{3}$"}]}),
    "regex": regex_grammar(r"(foo|foobar|foo bar)+ baz\d{2,4}"),
    "thinking": THINKING,
}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))


@cache
def tokens() -> LLTokenizer:
    return token_table(tokenizer().to_str(), VOCAB_SIZE, ENDS)


def matcher(grammar: str) -> Matcher:
    return Matcher(compiled(grammar, tokens()), VOCAB_SIZE, ENDS)


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids
