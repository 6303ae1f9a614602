"""What followed where the newest tokens occurred before."""

from array import array
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outrider.drafters.occurrences import LONGEST_MATCH, MIN_PROBABILITY, Continuation, Occurrences

texts = st.lists(
    st.integers(0, 2), max_size=28
)  # so short that no n-gram occurs more often than is looked at


def text_of(*texts: list[int]) -> Occurrences:
    """Texts one after another, each with its end."""
    occurrences = Occurrences()
    for text in texts:
        occurrences.append(text)
        occurrences.end()
    return occurrences


def num_ngrams(text: Occurrences) -> int:
    """Number of n-grams for which memory is held."""
    return sum(len(chain.newest) for chain in text._chains)


def by_the_book(text: list[int], context: list[int], depth: int) -> Continuation:
    """Every match length, the most frequent child, the product of their shares; the best score wins."""
    best = Continuation()
    for matched in range(min(len(context), LONGEST_MATCH), 0, -1):
        at = [i for i in range(len(text) - 1, matched - 1, -1) if text[i - matched : i] == context[-matched:]]
        tokens: list[int] = []
        probabilities: list[float] = []
        while at and len(tokens) < min(matched, depth):
            longer = text + tokens  # what reaches the end goes on with itself
            following = [longer[i + len(tokens)] for i in at]
            token, count = Counter(following).most_common(1)[0]
            share = count / len(at)
            probability = share * (probabilities[-1] if probabilities else 1.0)
            if probability < MIN_PROBABILITY:
                break
            at = [i for i, followed in zip(at, following, strict=True) if followed == token]
            tokens.append(token)
            probabilities.append(probability)
        guess = Continuation(tuple(tokens), tuple(probabilities))
        best = guess if guess.score > best.score else best
    return best


@pytest.mark.parametrize(
    ("text", "context", "depth", "tokens", "score"),
    [
        ([1, 2, 3, 4, 9], [1, 2, 3], 8, (4, 9), 2.0),  # to the end of the text
        ([1, 2, 3, 4, 5, 6], [7, 2], 8, (3,), 1.0),  # no more than have matched
        ([1, 2, 3, 4, 5, 6], [1, 2], 1, (3,), 1.0),  # no more than are asked for
        ([1, 5, 1, 6, 1, 5], [1], 8, (5,), 2 / 3),  # the most frequent one
        ([1, 5, 1, 6], [1], 8, (6,), 1 / 2),  # newest of the equally frequent tokens
        ([1, 2, 7, 8, 3, 2, 9, 5, 2, 9], [1, 2], 8, (7, 8), 2.0),  # a longer match that is sure of more
        ([4, 1, 2], [1], 8, (2,), 1.0),
        ([1, 2], [3], 8, (), 0.0),
        ([1, 2], [], 8, (), 0.0),
        ([], [1], 8, (), 0.0),
    ],
)
def test_occurrences_guess_the_continuation_with_the_highest_score(
    text: list[int], context: list[int], depth: int, tokens: tuple[int, ...], score: float
) -> None:
    guess = text_of(text).guess(array("q", context), depth)
    assert guess.tokens == tokens
    assert guess.score == pytest.approx(score)


def test_occurrences_leave_unlikely_tokens_out() -> None:
    """Each of ten continuations is likely enough, none of eleven is."""
    for continuations, length in ((10, 1), (11, 0)):
        text = [token for other in range(continuations) for token in (99, other)]
        assert len(text_of(text).guess(array("q", [99]), 8).tokens) == length


@given(texts, st.integers(0, 20))
def test_occurrences_guess_equals_a_plain_search(text: list[int], depth: int) -> None:
    occurrences = Occurrences()
    occurrences.append(text)
    guess, expected = occurrences.guess(occurrences.tail(), depth), by_the_book(text, text, depth)
    assert guess.score == pytest.approx(expected.score)
    assert len(guess.probabilities) == len(guess.tokens) <= depth
    assert not guess.tokens or text[-1] in text[:-1]


@given(st.lists(texts, max_size=4), texts)
@example([[1, 0], [1, 0, 0, 1, 0, 0, 1], [1, 0]], [1, 0])
def test_occurrences_match_does_not_run_into_the_next_text(
    others: list[list[int]], context: list[int]
) -> None:
    # An end of its own for each text: no end is to be guessed for having come twice.
    ended = [token for number, text in enumerate(others) for token in (*text, -1 - number)]
    guess = text_of(*others).guess(array("q", context), 8)
    assert guess.score <= by_the_book(ended, context, 8).score + 1e-9
    joined = " ".join(map(str, guess.tokens))
    assert any(joined in " ".join(map(str, text)) for text in others) or not guess.tokens


@given(st.lists(texts, min_size=1, max_size=6), texts, st.data())
def test_occurrences_after_forgetting_equal_those_of_the_rest(
    texts: list[list[int]], context: list[int], data: st.DataObject
) -> None:
    gone = data.draw(st.integers(0, len(texts)))
    occurrences = text_of(*texts)
    occurrences.forget(sum(len(text) + 1 for text in texts[:gone]))
    left = text_of(*texts[gone:])
    assert len(occurrences) == len(left)
    assert occurrences.guess(array("q", context), 8) == left.guess(array("q", context), 8)
    assert num_ngrams(occurrences) == num_ngrams(left)


@given(texts, st.integers(0, 28))
def test_appending_bit_by_bit_is_the_same(text: list[int], split: int) -> None:
    bit_by_bit, at_once = Occurrences(), Occurrences()
    bit_by_bit.append(text[:split])
    for token in text[split:]:
        bit_by_bit.append([token])
    at_once.append(text)
    assert bit_by_bit.guess(at_once.tail(), 8) == at_once.guess(at_once.tail(), 8)
