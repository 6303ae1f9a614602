"""Past answers, for drafters that guess from them: in memory, and never shared between callers."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.drafters.occurrences import Occurrences

LONGEST_ANSWER = 2048  # tokens; the last tokens of a longer answer are kept


@dataclass(frozen=True)
class Scope:
    """Caller and task whose past answers a sequence may be drafted from."""

    caller: str | None = None  # None: not known, nothing is kept
    task: str | None = None  # the request's label


NOBODYS = Scope()


class PastAnswers:
    """Newest answers of all scopes. If they exceed the limit, the oldest answer of any scope is dropped."""

    def __init__(self, max_tokens: int = 0) -> None:
        """max_tokens: tokens of all answers, with the ends of texts; 0: nothing is kept."""
        self._max_tokens = max_tokens
        self._texts: dict[Scope, Occurrences] = {}
        self._kept: deque[tuple[Scope, int]] = deque()  # tokens of each answer with its end, oldest first
        self._size = 0

    def __len__(self) -> int:
        """Number of tokens, with the ends of texts."""
        return self._size

    def of(self, scope: Scope) -> Occurrences:
        """Returns the past answers of a scope. The caller must read them at once: they may change later."""
        return self._texts.get(scope, NOTHING)

    def newest(self, scope: Scope, count: int) -> list[tuple[int, ...]]:
        """Returns the newest answers of a scope, ``count`` tokens with the ends of texts, the newest last."""
        return self.of(scope).newest(count)

    def add(self, scope: Scope, answer: Sequence[int]) -> None:
        """Adds an answer's tokens. No-op for the newest answer: several drafters of a sequence may add it."""
        longest = min(LONGEST_ANSWER, self._max_tokens - 1)
        if scope.caller is None or not answer or longest < 1:
            return
        answer = answer[-longest:]
        size = len(answer) + 1
        if self.newest(scope, size) == [tuple(answer)]:
            return
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
