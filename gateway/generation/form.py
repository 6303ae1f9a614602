"""Forms that an answer can be held to, and the grammars that they stand for."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from llguidance import LLMatcher
from tokenizers import Tokenizer

from gateway.errors import InvalidRequestError
from outrider.decoding.grammar import MAX_GRAMMAR, GrammarError, compiled, token_table

MAX_CHOICES = 4096
MAX_KEPT = 1024  # grammars that are known to be good or bad


@dataclass(frozen=True)
class Thoughts:
    """Free text before the form of an answer begins."""

    opening: str | None  # mark before them, if there are any, as Lark has it; None: they have begun
    close: str  # mark after them

    def before(self, grammar: str) -> str:
        """Of the thoughts, and after them what follows this grammar."""
        is_lark = not grammar.startswith("{")
        (answer,) = [{"lark_grammar": grammar}] if is_lark else json.loads(grammar)["grammars"]
        text = f"TEXT {self.close}" if self.close.startswith("<[") else "closed"
        begin = text if self.opening is None else f"({self.opening} {text})?"
        lines = [f"start: {begin} @answer", "TEXT: /(.|\\n)*/"]
        if text == "closed":
            lines.append(f"closed[lazy]: TEXT {self.close}")
        thoughts = {"lark_grammar": "\n".join(lines)}
        return json.dumps({"grammars": [thoughts, {**answer, "name": "answer"}]})


@dataclass(frozen=True)
class Form:
    """What a request asks for, as it says it."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str
    field: str  # the request's own name for it
    thoughts: Thoughts | None = None  # that may come before
    ends_itself: bool = True  # its end is the answer's; False: free text, which may end anywhere

    def grammar(self) -> str:
        """As llguidance takes it. Raises GrammarError."""
        grammar = self._of_answer()
        return grammar if self.thoughts is None else self.thoughts.before(grammar)

    def _of_answer(self) -> str:
        if len(self.source) > MAX_GRAMMAR:
            raise GrammarError(f"{len(self.source)} characters, at most {MAX_GRAMMAR} are accepted")
        if self.kind == "regex":
            return LLMatcher.grammar_from_regex(self.source)
        if self.kind == "lark":
            return LLMatcher.grammar_from_lark(self.source)
        try:
            # On one line, as json.dumps writes it: so names and punctuation are forced, and no model can go
            # on with spaces for ever. A schema's own x-guidance wins.
            return LLMatcher.grammar_from_json_schema(
                self.source,
                defaults={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
            )
        except ValueError as error:
            raise GrammarError(f"is no JSON schema: {error}") from error


def mark(text: str, added: Mapping[str, int]) -> str:
    """A text between the parts of an answer, as Lark has it: by its id where it is a token of its own.

    added: ids of tokens that the tokenizer never makes of other text, and that no text can say.
    """
    return f"<[{added[text]}]>" if text in added else json.dumps(text)


def json_object(field: str) -> Form:
    """Any JSON object."""
    return json_schema('{"type": "object"}', field)


def json_schema(schema: str, field: str) -> Form:
    return Form("json_schema", schema, field)


def choice(texts: Sequence[str], field: str) -> Form:
    """One of these texts. Raises InvalidRequestError."""
    if not 1 <= len(texts) <= MAX_CHOICES or "" in texts:
        raise InvalidRequestError(field, f"1 to {MAX_CHOICES} texts are accepted, none of them empty")
    literals = (json.dumps(text, ensure_ascii=False) for text in texts)
    return Form("lark", "start: " + " | ".join(literals), field)


class Grammars:
    """Tries the grammars of requests, in a thread of its own, so that a bad one is refused at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # At once: it keeps the interpreter for a second where the vocabulary is large.
        self._tokens = token_table(tokenizer.to_str(), tokenizer.get_vocab_size(with_added_tokens=True))
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._tried: OrderedDict[str, GrammarError | None] = OrderedDict()

    async def grammar(self, form: Form) -> str:
        """That the form stands for. Raises InvalidRequestError for one that cannot be compiled."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._compiled, form)
        except GrammarError as error:
            raise InvalidRequestError(form.field, str(error)) from error

    def _compiled(self, form: Form) -> str:
        grammar = form.grammar()
        if grammar not in self._tried:
            self._tried[grammar] = self._error(grammar)
        self._tried.move_to_end(grammar)
        while len(self._tried) > MAX_KEPT:
            self._tried.popitem(last=False)
        if (error := self._tried[grammar]) is not None:
            raise error
        return grammar

    def _error(self, grammar: str) -> GrammarError | None:
        try:
            compiled(grammar, self._tokens)
        except GrammarError as error:
            return error
        return None
