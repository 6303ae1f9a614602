"""Earlier occurrences of a text's newest tokens, and the tokens after them. Torch-free."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

# Chosen, not measured.
SIZES = (8, 4, 2, 1)  # tokens of the n-grams by which occurrences are found
LONGEST_MATCH = 24  # most tokens of a context that are compared
MAX_COMPARED = 32  # newest occurrences of an n-gram that are compared
MIN_PROBABILITY = 0.1  # least probability, of a token and all before it, at which the token is guessed
END = -1  # stands in place of a token at the end of a text
NONE = -1


@dataclass(frozen=True)
class Continuation:
    """Tokens that may follow, each with the probability that it and all before it are correct."""

    tokens: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()  # descending
    matched: int = 0  # number of the text's last tokens that occurred before

    @property
    def score(self) -> float:
        """Expected number of correct tokens."""
        return sum(self.probabilities)


class Occurrences:
    """Occurrences of all n-grams of one text, or of several texts one after another.

    N-grams of a few sizes are hashed, and each occurrence links to the previous occurrence, as in LZ77 coders
    (Ziv and Lempel, 1977). So the cost per token does not grow with the text, and old text can be dropped.
    """

    def __init__(self) -> None:
        self._tokens = array("q")
        self._first = 0  # position of the first token that is kept
        self._recent: tuple[int, ...] = ()  # the newest tokens of the newest text
        self._chains = tuple(_Chain(size, {}, array("q")) for size in SIZES)

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Adds tokens to the newest text."""
        recent, here = self._recent, self._first + len(self._tokens)
        for token in tokens:
            for size, newest, before in self._chains:
                if len(recent) < size:
                    before.append(NONE)
                else:
                    key = hash(recent[-size:])
                    before.append(newest.get(key, NONE))
                    newest[key] = here
            recent = (*recent[1 - SIZES[0] :], token)
            here += 1
        self._recent = recent
        self._tokens.extend(tokens)

    def end(self) -> None:
        """Ends the newest text: the next tokens belong to another text."""
        self.append((END,))
        self._recent = ()

    def newest(self, count: int) -> list[tuple[int, ...]]:
        """Returns the last ``count`` tokens, split into texts; the first text may lack its beginning."""
        texts = groupby(self._tokens[max(len(self._tokens) - count, 0) :], END.__eq__)
        return [tuple(text) for is_end, text in texts if not is_end]

    def forget(self, count: int) -> None:
        """Forgets the first ``count`` tokens, which must be whole texts with their END."""
        begin = 0
        for here in range(count):
            for size, newest, _ in self._chains:
                if here - begin >= size:
                    key = hash(tuple(self._tokens[here - size : here]))
                    if newest[key] == self._first + here:
                        del newest[key]
            if self._tokens[here] == END:
                begin = here + 1
        del self._tokens[:count]
        for chain in self._chains:
            del chain.before[:count]
        self._first += count

    def tail(self) -> "array[int]":
        """Returns the newest tokens, as many as ``guess`` compares."""
        return self._tokens[-LONGEST_MATCH:]

    def guess(self, context: "array[int]", depth: int) -> Continuation:
        """Returns the best continuation of ``context``, at most ``depth`` tokens.

        Each suffix of the context that occurred before gives a guess. The guess takes the likeliest token
        after these occurrences, then the likeliest next token, and so on, up to the length of the suffix.
        The guess with the highest score is the best. Source: Oliaro et al., "SuffixDecoding", 2024.
        """
        best = Continuation()
        too_long = LONGEST_MATCH + 1
        for chain in self._chains:
            found = self._found(chain, context)
            lengths = [min(length, too_long - 1) for length, _ in found]
            for matched in sorted(set(lengths), reverse=True):
                if min(matched, depth) <= best.score:
                    return best  # no shorter match can have a higher score
                at = [place for length, (_, place) in zip(lengths, found, strict=True) if length >= matched]
                guess = replace(self._followed(at, min(matched, depth)), matched=matched)
                best = guess if guess.score > best.score else best
            too_long = chain.size
        return best

    def _found(self, chain: "_Chain", context: "array[int]") -> list[tuple[int, int]]:
        """Returns occurrences of the last n-gram, newest first: matching tokens, place of the next token."""
        if len(context) < chain.size:
            return []
        found = []
        position = chain.newest.get(hash(tuple(context[-chain.size :])), NONE)
        for _ in range(MAX_COMPARED):
            place = position - self._first
            if place < 0:
                break
            matched = self._matched(place, context)
            if matched >= chain.size:  # another n-gram may have the same hash
                found.append((matched, place))
            position = chain.before[place]
        return found

    def _matched(self, place: int, context: "array[int]") -> int:
        longest = min(place, len(context))
        if self._tokens[place - longest : place] == context[-longest:]:
            return longest
        matched = 0
        while matched < longest and self._tokens[place - 1 - matched] == context[-1 - matched]:
            matched += 1
        return matched

    def _followed(self, places: list[int], limit: int) -> Continuation:
        """Returns the likeliest tokens from these places on; after the last token, the guess is read."""
        tokens: list[int] = []
        probabilities: list[float] = []
        probability = 1.0
        while len(tokens) < limit:
            step = len(tokens)
            following = [
                self._tokens[place + step]
                if place + step < len(self._tokens)
                else tokens[place + step - len(self._tokens)]
                for place in places
            ]
            counts = Counter(following)
            del counts[END]
            if not counts:
                break
            token, count = max(counts.items(), key=lambda item: item[1])  # ties go to the newest token
            probability *= count / len(places)
            if probability < MIN_PROBABILITY:
                break
            tokens.append(token)
            probabilities.append(probability)
            places = [place for place, found in zip(places, following, strict=True) if found == token]
        return Continuation(tuple(tokens), tuple(probabilities))


class _Chain(NamedTuple):
    """Occurrences of the n-grams of one size, by the position of the next token."""

    size: int
    newest: dict[int, int]  # key: hash of the n-gram
    before: "array[int]"  # [tokens] position of the previous occurrence, or NONE
