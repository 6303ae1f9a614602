"""Drafting from a prediction, which is the answer that a request expects. Torch-free.

OpenAI calls it predicted outputs. An answer that rewrites a text mostly copies it, so the text is a good
Draft.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from outrider.decoding.draft import Draft
from outrider.drafters.occurrences import Continuation

# Chosen, not measured.
LONGEST_MATCH = 8  # most tokens that are compared
MAX_COMPARED = 32  # nearest occurrences of a token that are compared
NEAR = 16  # tokens; a match of a single token counts only this far ahead
FORESEEN_IN_A_ROW = 2  # consecutive foreseen tokens after which the place is certain


class PredictionIndex:
    """Index that reads ahead in a prediction, and finds its place again after an edit.

    The answer starts at the beginning of the prediction. A token that was not foreseen may be an edit of any
    length. The new place is then the longest occurrence of the answer's newest tokens, the nearest to the
    last certain place among equally long occurrences. Without an occurrence, the token counts as a
    substitution.
    """

    def __init__(self, prediction: Sequence[int], start: int) -> None:
        """
        Args:
            prediction: token ids.
            start: position of the answer's first token in its sequence.
        """
        self._prediction = list(prediction)
        self._before = start  # tokens of the prompt that are still to come
        self._prompt_length = start
        self._answer: list[int] = []
        self._place = 0  # index of the predicted token that comes next
        self._certain = 0  # last place that was certain
        self._in_a_row = 0  # consecutive foreseen tokens up to now
        self._places: defaultdict[int, list[int]] = defaultdict(list)  # places after each token, ascending
        for place, token in enumerate(self._prediction, start=1):
            self._places[token].append(place)
        self.foreseen = 0  # tokens of the answer that equalled the predicted token

    def __len__(self) -> int:
        return self._prompt_length - self._before + len(self._answer)

    def append(self, tokens: Sequence[int]) -> None:
        """Adds committed tokens: the prompt, which is skipped, and the answer."""
        skipped = min(self._before, len(tokens))
        self._before -= skipped
        for token in tokens[skipped:]:
            self._answer.append(token)
            self._follow(token)

    def propose(self, depth: int) -> Draft:
        """Returns the next ``depth`` predicted tokens, fewer at the end of the prediction."""
        return Draft.chain(self.guess(depth).tokens)

    def guess(self, depth: int) -> Continuation:
        """Returns the tokens of ``propose``'s chain, and how many tokens before them were foreseen."""
        tokens = tuple(self._prediction[self._place : self._place + depth])
        return Continuation(tokens, matched=1 + self._in_a_row)

    def _follow(self, token: int) -> None:
        """Moves to the place after a token of the answer."""
        if self._prediction[self._place : self._place + 1] == [token]:
            self.foreseen += 1
            self._in_a_row += 1
            self._place += 1
            if self._in_a_row >= FORESEEN_IN_A_ROW:
                self._certain = self._place
            return
        self._in_a_row = 0
        found = self._found(token)
        self._place = min(self._place + 1, len(self._prediction)) if found is None else found

    def _found(self, token: int) -> int | None:
        """Returns the place after the best occurrence of the answer's newest tokens, if there is any."""
        places = self._places.get(token, [])
        middle = bisect_left(places, self._certain)
        nearest = places[max(middle - MAX_COMPARED // 2, 0) : middle + MAX_COMPARED // 2]
        matches = [
            (self._matched(place), place >= self._certain, -abs(place - self._certain)) for place in nearest
        ]
        if not matches:
            return None
        best = max(matches)
        place = nearest[matches.index(best)]
        is_near = self._certain <= place <= self._certain + NEAR
        return place if best[0] > 1 or is_near else None

    def _matched(self, place: int) -> int:
        """Returns how many of the answer's newest tokens equal the prediction before that place."""
        longest = min(place, len(self._answer), LONGEST_MATCH)
        for length in range(1, longest):
            if self._prediction[place - 1 - length] != self._answer[-1 - length]:
                return length
        return longest


def foreseen(prediction: Sequence[int], answer: Sequence[int]) -> int:
    """Returns how many tokens of an answer were foreseen, whatever was drafted."""
    index = PredictionIndex(prediction, 0)
    index.append(answer)
    return index.foreseen
