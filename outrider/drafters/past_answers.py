"""Answers of the past, for drafters that guess from them: in memory, and never shared between callers."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.drafters.occurrences import Occurrences

LONGEST_ANSWER = 2048  # tokens; of a longer answer its last ones are kept


@dataclass(frozen=True)
class Scope:
    """Caller and task whose past answers a sequence may be drafted from."""

    caller: str | None = None  # None: not known, nothing is kept
    task: str | None = None  # the request's label


NOBODYS = Scope()


class PastAnswers:
    """Newest answers of all scopes. If they get too many, the oldest answer goes, whatever its scope."""

    def __init__(self, max_tokens: int = 0) -> None:
        """max_tokens: tokens of all answers, the ends of texts included; 0: nothing is kept."""
        self._max_tokens = max_tokens
        self._texts: dict[Scope, Occurrences] = {}
        self._kept: deque[tuple[Scope, int]] = deque()  # tokens of each answer with its end, oldest first
        self._size = 0

    def __len__(self) -> int:
        """Tokens, the ends of texts included."""
        return self._size

    def of(self, scope: Scope) -> Occurrences:
        """Returns the past answers of a scope. Read them at once: later they may be other ones."""
        return self._texts.get(scope, NOTHING)

    def add(self, scope: Scope, answer: Sequence[int]) -> None:
        """Takes note of an answer's tokens."""
        longest = min(LONGEST_ANSWER, self._max_tokens - 1)
        if scope.caller is None or not answer or longest < 1:
            return
        answer = answer[-longest:]
        size = len(answer) + 1
        while self._size + size > self._max_tokens:
            self._forget_oldest()
        text = self._texts.setdefault(scope, Occurrences())
        text.append(answer)
        text.end()
        self._kept.append((scope, size))
        self._size += size

    def _forget_oldest(self) -> None:
        scope, size = self._kept.popleft()
        self._texts[scope].forget(size)
        self._size -= size
        if not self._texts[scope]:
            del self._texts[scope]


NOTHING = Occurrences()
