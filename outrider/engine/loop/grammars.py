"""Grammars of sequences, compiled in background threads: no step waits for a compilation.

A caller who has the deployment's token can bypass the gateways and send any grammar. So each grammar is tried
in a sandbox process, which may crash, before this process compiles it.
"""

import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from outrider.decoding.grammar import GrammarError, Matcher, compiled, token_table
from outrider.decoding.grammar_sandbox import STACK, GrammarSandbox, SandboxVocabulary
from outrider.engine.sequence import EngineSequence
from outrider.engine.tasks.task import Task
from outrider.learning.lru import Lru

logger = logging.getLogger(__name__)

MAX_KEPT = 64  # compiled grammars; the least recently used is dropped
MAX_KEPT_BYTES = 2**30  # memory that compiling the kept grammars took
AT_ONCE = 4  # grammars that are compiled at a time
# CPU seconds. They are twice the largest limit of a gateway, as this machine may be slower.
LONGEST_COMPILE_S = 20
COMPILE_STACK = 4 * STACK  # bytes; a grammar that passed the sandbox cannot overflow this stack
LONGEST_WAIT_S = 0.001  # longest duration of a step that only waits for grammars


@dataclass(frozen=True)
class Compiled:
    matcher: LLMatcher  # matcher at the beginning of an answer
    bytes: int  # memory that compiling took


class Grammars:
    """Grammars of one engine. Only the engine's thread calls the methods."""

    def __init__(
        self,
        tokens: LLTokenizer | None,
        vocab_size: int,
        end_token_ids: frozenset[int],
        sandbox: GrammarSandbox | None = None,
    ) -> None:
        """
        Args:
            tokens: tokens of the vocabulary; None: without a tokenizer, grammars are refused.
            end_token_ids: ids of the model's end-of-sequence tokens.
            sandbox: sandbox with these tokens; None if and only if ``tokens`` is None.
        """
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._ends = end_token_ids
        self._sandbox = sandbox
        self._threads = ThreadPoolExecutor(AT_ONCE, "grammars")
        self._compiled: Lru[str, Future[Compiled]] = Lru(MAX_KEPT)
        self._waiting: dict[int, tuple[EngineSequence, Future[Compiled]]] = {}  # key: number of the sequence

    @classmethod
    def of_checkpoint(cls, model: str, vocab_size: int, end_token_ids: frozenset[int]) -> "Grammars":
        """Returns the grammars of a checkpoint. Without a tokenizer they refuse every grammar.

        model: local folder or hub id.
        """
        tokenizer = _tokenizer(model)
        if tokenizer is None or not end_token_ids:
            return cls(None, vocab_size, end_token_ids)
        size = max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
        text = tokenizer.to_str()
        sandbox = GrammarSandbox(SandboxVocabulary(text, size, end_token_ids))
        return cls(token_table(text, size, end_token_ids), vocab_size, end_token_ids, sandbox)

    def warm_up(self) -> None:
        """Starts the sandbox. Does not block."""
        if self._sandbox is not None:
            self._sandbox.start()

    def begin(self, sequence: EngineSequence) -> None:
        """Submits the sequence's grammar, if any, to be compiled.

        Raises:
            GrammarError: the model has no tokenizer, or the sequence ignores the end of sequence.
        """
        grammar = sequence.sampling.grammar
        if grammar is None:
            return
        if self._tokens is None or sequence.sampling.ignore_eos:
            raise GrammarError("grammar: needs a tokenizer.json, and an end of sequence that is not ignored")
        compiling = self._compiled.get(grammar, partial(self._submit, grammar))
        self._waiting[sequence.number] = sequence, compiling
        self._drop()

    def _submit(self, grammar: str) -> "Future[Compiled]":
        with _stack(COMPILE_STACK):  # submitting may start a thread
            return self._threads.submit(self._compile, grammar)

    def _compile(self, grammar: str) -> "Compiled":
        assert self._sandbox is not None
        assert self._tokens is not None
        taken = self._sandbox.run(grammar, LONGEST_COMPILE_S)
        return Compiled(compiled(grammar, self._tokens), taken)

    def _drop(self) -> None:
        """Drops the least recently used grammars if all take more memory than the limit."""
        total = sum(_bytes(held) for _, held in self._compiled.items())
        while total > MAX_KEPT_BYTES and len(self._compiled) > 1:
            _, dropped = self._compiled.evict()
            total -= _bytes(dropped)

    def forget(self, sequence: EngineSequence) -> None:
        """Stops waiting for the grammar of a sequence that is closed."""
        _, compiling = self._waiting.pop(sequence.number, (None, None))
        if compiling is None or any(compiling is other for _, other in self._waiting.values()):
            return
        if compiling.cancel():  # compiling had not begun
            assert sequence.sampling.grammar is not None
            self._compiled.drop(sequence.sampling.grammar)

    def ready(self, tasks: Mapping[int, Task]) -> Mapping[int, Task]:
        """Returns the tasks whose sequences do not wait for a grammar, by number of the sequence."""
        if not self._waiting:
            return tasks
        return {number: task for number, task in tasks.items() if number not in self._waiting}

    def take(self) -> list[tuple[EngineSequence, BaseException]]:
        """Gives sequences their compiled matchers; returns sequences whose grammar cannot be compiled."""
        failed = []
        for number, (sequence, compiling) in [*self._waiting.items()]:
            if not compiling.done():
                continue
            del self._waiting[number]
            if (error := compiling.exception()) is not None:
                failed.append((sequence, error))
            else:
                ends = self._ends | sequence.end_token_ids
                sequence.matcher = Matcher(compiling.result().matcher, self._vocab_size, ends)
        return failed

    def wait(self) -> None:
        """Waits until a grammar is compiled, at most LONGEST_WAIT_S."""
        wait([compiling for _, compiling in self._waiting.values()], LONGEST_WAIT_S, FIRST_COMPLETED)

    def shut_down(self) -> None:
        """Stops the threads and the sandbox."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._sandbox is not None:
            self._sandbox.close()


def _bytes(compiling: Future[Compiled]) -> int:
    """Returns the memory that compiling took; 0: not known yet, or failed."""
    is_there = compiling.done() and not compiling.cancelled() and compiling.exception() is None
    return compiling.result().bytes if is_there else 0


@contextmanager
def _stack(size: int) -> Iterator[None]:
    """Sets the stack size, in bytes, of threads that start inside this context."""
    before = threading.stack_size(size)
    try:
        yield
    finally:
        threading.stack_size(before)


def _tokenizer(model: str) -> Tokenizer | None:
    file = Path(model) / "tokenizer.json"
    try:
        if Path(model).is_dir():
            return Tokenizer.from_file(str(file)) if file.is_file() else None
        return Tokenizer.from_pretrained(model)
    except Exception as error:  # the library raises errors of its own and of Python
        logger.warning("model=%r: its tokenizer cannot be read, so grammars are refused: %s", model, error)
        return None
