"""Grammars of sequences, compiled in a thread of their own: no step waits for one."""

import logging
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from outrider.decoding.grammar import GrammarError, Matcher, compiled, token_table
from outrider.engine.sequence import Sequence
from outrider.engine.tasks.task import Task

logger = logging.getLogger(__name__)

MAX_KEPT = 64  # compiled grammars, the one not asked for for longest is dropped
LONGEST_WAIT_S = 0.001  # of a step that has nothing but grammars to wait for


class Grammars:
    """One for an engine, whose thread calls it."""

    def __init__(self, tokens: LLTokenizer | None, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        """
        Args:
            tokens: of the model's vocabulary; None: there is no tokenizer, and no grammar.
            end_token_ids: of the model.
        """
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._ends = end_token_ids
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._waiting: dict[int, tuple[Sequence, Future[LLMatcher]]] = {}  # by number of the sequence

    @classmethod
    def of_checkpoint(cls, model: str, vocab_size: int, end_token_ids: frozenset[int]) -> "Grammars":
        """model: local folder or hub id; one without a tokenizer takes no grammars."""
        tokenizer = _tokenizer(model)
        if tokenizer is None or not end_token_ids:
            return cls(None, vocab_size, end_token_ids)
        size = max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
        return cls(token_table(tokenizer.to_str(), size, end_token_ids), vocab_size, end_token_ids)

    def begin(self, sequence: Sequence) -> None:
        """Has the sequence's grammar compiled, if it has one.

        Raises:
            GrammarError: this model takes none.
        """
        grammar = sequence.sampling.grammar
        if grammar is None:
            return
        if self._tokens is None or sequence.sampling.ignore_eos:
            raise GrammarError("grammar: needs a tokenizer.json, and an end of sequence that is not ignored")
        if grammar not in self._compiled:
            self._compiled[grammar] = self._thread.submit(partial(compiled, grammar, self._tokens))
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > MAX_KEPT:
            self._compiled.popitem(last=False)
        self._waiting[sequence.number] = sequence, self._compiled[grammar]

    def forget(self, sequence: Sequence) -> None:
        """It is closed."""
        self._waiting.pop(sequence.number, None)

    def ready(self, tasks: Mapping[int, Task]) -> Mapping[int, Task]:
        """Those of the tasks, by number of their sequence, that can take part in a step."""
        if not self._waiting:
            return tasks
        return {number: task for number, task in tasks.items() if number not in self._waiting}

    def take(self) -> list[tuple[Sequence, BaseException]]:
        """Gives sequences the matchers that are there; returns those whose grammar cannot be compiled."""
        failed = []
        for number, (sequence, compiling) in [*self._waiting.items()]:
            if not compiling.done():
                continue
            del self._waiting[number]
            if (error := compiling.exception()) is not None:
                failed.append((sequence, error))
            else:
                ends = self._ends | sequence.end_token_ids
                sequence.matcher = Matcher(compiling.result(), self._vocab_size, ends)
        return failed

    def wait(self) -> None:
        """For a moment, or until there is one more."""
        wait([compiling for _, compiling in self._waiting.values()], LONGEST_WAIT_S, FIRST_COMPLETED)

    def shut_down(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _tokenizer(model: str) -> Tokenizer | None:
    file = Path(model) / "tokenizer.json"
    try:
        if Path(model).is_dir():
            return Tokenizer.from_file(str(file)) if file.is_file() else None
        return Tokenizer.from_pretrained(model)
    except Exception as error:  # the library raises its own and plain ones
        logger.warning("model=%r: its tokenizer cannot be read, so grammars are refused: %s", model, error)
        return None
