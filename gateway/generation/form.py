"""Forms that an answer must have, and their grammars."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

from llguidance import LLMatcher
from tokenizers import Tokenizer

from gateway.errors import DeadlineError, InvalidRequestError
from gateway.generation.json_schemas import AS_WRITTEN, fitted
from outrider.decoding.grammar import MAX_GRAMMAR, GrammarError
from outrider.decoding.grammar_sandbox import GrammarSandbox, SandboxVocabulary
from outrider.decoding.settings import Sampling
from outrider.learning.lru import Lru

MAX_CHOICES = 4096
AT_ONCE = 8  # grammars that are checked at a time, so a slow grammar does not delay all others
MAX_KEPT = 1024  # grammars whose check is cached


@dataclass(frozen=True)
class Thoughts:
    """Free text (reasoning) before the form of an answer begins."""

    opening: str | None  # mark before the thoughts in Lark's notation; None: they have begun in the prompt
    close: str  # mark after the thoughts; newlines around a mark belong to the mark

    def rules(self) -> list[str]:
        """Returns the rules of thoughts; the first rule is named ``thoughts``."""
        text, rule = up_to(self.close, "TEXT", "closed")
        begin = f"{text} NEWLINES?"
        if self.opening is not None:
            begin = f"(NEWLINES? {self.opening} {begin})?"
        return [f"thoughts: {begin}", "TEXT: /(.|\\n)*/", "NEWLINES: /\\n{1,2}/", rule]


@dataclass(frozen=True)
class Form:
    """Form of an answer, as the request gives it."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str
    field: str  # name of the field in the request
    thoughts: Thoughts | None = None  # free text that may come before the form
    ends_itself: bool = True  # whether the answer ends with the form; False: free text may end anywhere
    opening: str = ""  # mark before the answer, in Lark's notation
    calls: str = ""  # grammar of tool calls in Lark, as an alternative to the answer; empty: none

    def check(self, sampling: Sampling, stop: Sequence[str]) -> None:
        """Raises InvalidRequestError if other settings may end the answer before its form is complete."""
        contradicted = {"ignore_eos": sampling.ignore_eos}
        if self.ends_itself:
            contradicted["stop"] = bool(stop)
            contradicted["stop_token_ids"] = bool(sampling.stop_token_ids)
            contradicted["min_tokens"] = sampling.min_tokens > 0
        if wrong := next((name for name, is_set in contradicted.items() if is_set), None):
            raise InvalidRequestError(
                wrong, f"cannot be combined with {self.field}: the answer ends where its form does"
            )

    def grammar(self) -> str:
        """Returns the grammar in llguidance's notation. Raises GrammarError."""
        grammar = self._of_answer()
        if self.thoughts is None and not self.opening and not self.calls:
            return grammar
        is_lark = not grammar.startswith("{")
        (answer,) = [{"lark_grammar": grammar}] if is_lark else json.loads(grammar)["grammars"]
        rules = ['thoughts: ""'] if self.thoughts is None else self.thoughts.rules()
        said = f"{self.opening} @answer"
        parts = [{**answer, "name": "answer"}]
        if self.calls:
            said += " | @calls"
            parts.append({"lark_grammar": self.calls, "name": "calls"})
        whole = {"lark_grammar": "\n".join([f"start: thoughts ({said})", *rules])}
        return json.dumps({"grammars": [whole, *parts]})

    def _of_answer(self) -> str:
        size = len(self.source) + len(self.calls)
        if size > MAX_GRAMMAR:
            raise GrammarError(f"{size} characters, at most {MAX_GRAMMAR} are accepted")
        if self.kind == "regex":
            return LLMatcher.grammar_from_regex(self.source)
        if self.kind == "lark":
            return LLMatcher.grammar_from_lark(self.source)
        try:
            schema = json.dumps(fitted(json.loads(self.source)))
            # Options in the schema's own x-guidance take precedence over these defaults.
            return LLMatcher.grammar_from_json_schema(schema, defaults=AS_WRITTEN)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"is no JSON schema: {error}") from error


def mark(text: str, added: Mapping[str, int]) -> str:
    """Returns a text around the parts of an answer in Lark's notation, with token ids for the marks in it.

    added: ids of added tokens by their text; a grammar can name them by id only.
    """
    # Added tokens of one or two characters, or of whitespace, are no marks: models write them as text.
    marks = sorted(
        (token for token in added if len(token.strip()) > 2 and token in text), key=len, reverse=True
    )
    parts = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    return " ".join(
        f"<[{added[part]}]>" if part in marks else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    )


def up_to(mark: str, pattern: str, name: str) -> tuple[str, str]:
    """Returns a Lark expression for text of a pattern up to the first mark, and the rule that it needs.

    Args:
        mark: mark in Lark's notation; if it has a token, the end of the text is unambiguous.
        name: unused name, for the rule.
    """
    words, token, rest = mark.partition("<[")
    if not token:
        return name, f"{name}[lazy]: {pattern} {mark}"
    if not words.strip():
        return f"{pattern} {mark}", ""
    return f"{name.upper()} {token}{rest}", f"{name.upper()}: {pattern} {words}"


def json_object(field: str) -> Form:
    """Returns a form that allows any JSON object."""
    return json_schema('{"type": "object"}', field)


def json_schema(schema: str, field: str) -> Form:
    return Form("json_schema", schema, field)


def choice(texts: Sequence[str], field: str) -> Form:
    """Returns a form that allows only these texts. Raises InvalidRequestError."""
    if not 1 <= len(texts) <= MAX_CHOICES or "" in texts:
        raise InvalidRequestError(field, f"1 to {MAX_CHOICES} texts are accepted, none of them empty")
    literals = (json.dumps(text, ensure_ascii=False) for text in texts)
    return Form("lark", "start: " + " | ".join(literals), field)


@dataclass
class _Check:
    outcome: Future[GrammarError | None]
    waiting: int = 0  # requests that wait for the outcome


class GrammarChecks:
    """Checks the grammars of requests: an invalid grammar is refused before it reaches a worker."""

    def __init__(self, tokenizer: Tokenizer, compile_s: int) -> None:
        """compile_s: seconds of processor time that the compilation of one grammar may take."""
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._sandbox = GrammarSandbox(SandboxVocabulary(tokenizer.to_str(), size))
        self._compile_s = compile_s
        self._threads = ThreadPoolExecutor(AT_ONCE, "grammars")
        self._checks: Lru[bytes, _Check] = Lru(MAX_KEPT)  # key: SHA-256 of the grammar

    def warm_up(self) -> None:
        """Starts the sandbox. Does not block."""
        self._sandbox.start()

    def close(self) -> None:
        """Ends the sandbox and the threads that wait for it."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._sandbox.close()

    async def grammar(self, form: Form, deadline: float) -> str:
        """Returns the grammar of a form, after its check.

        Args:
            deadline: in the event loop's time.

        Raises:
            InvalidRequestError: the grammar cannot be compiled, or takes too much time or memory.
            DeadlineError: the check did not end before the deadline.
        """
        try:
            grammar = form.grammar()
            error = await self._error(grammar, deadline)
        except GrammarError as refused:
            error = refused
        if error is not None:
            raise InvalidRequestError(form.field, str(error)) from error
        return grammar

    async def _error(self, grammar: str, deadline: float) -> GrammarError | None:
        """Waits for the check of a grammar, which requests with an equal grammar share.

        A check that has not begun is cancelled once no request waits for it.
        """
        key = sha256(grammar.encode()).digest()
        check = self._checks.get(key, lambda: _Check(self._threads.submit(self._outcome, grammar)))
        check.waiting += 1
        try:
            outcome = asyncio.wrap_future(check.outcome)
            left_s = deadline - asyncio.get_running_loop().time()
            await asyncio.wait({outcome}, timeout=left_s)
        finally:
            check.waiting -= 1
            if not check.waiting and check.outcome.cancel():  # the check had not begun
                self._checks.drop(key)
        if not outcome.done():
            raise DeadlineError("the form was not compiled within the request's deadline")
        if outcome.exception() is not None:
            self._checks.drop(key)
        return outcome.result()

    def _outcome(self, grammar: str) -> GrammarError | None:
        try:
            self._sandbox.run(grammar, self._compile_s)
        except GrammarError as error:
            return error
        return None
