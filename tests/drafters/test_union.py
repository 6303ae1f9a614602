"""Unions of a target drafter's Draft with what an index finds in the text."""

from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.draft import ROOT, Draft
from outrider.drafters.ngram import NgramIndex
from outrider.drafters.occurrences import END, Continuation
from outrider.drafters.prediction import PredictionIndex
from outrider.drafters.suffix import SuffixIndex
from outrider.drafters.union import (
    DEEPEST,
    MAX_UNION_NODES,
    PRIOR_RATES,
    PRIOR_RATES_OF_PREDICTIONS,
    DraftUnion,
    LearnedRates,
)

REPEATED = [*range(10, 30)]
TEXT = [*REPEATED, 1, *REPEATED[:12]]
FOUND = (*REPEATED[12:], 1, *REPEATED[:3])  # what the index guesses: as many tokens as match
MANY = 100  # nodes

tokens = st.integers(0, 2)


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """A tree of a few tokens."""
    found, parents = list[int](), list[int]()
    for _ in range(draw(st.integers(0, 6))):
        parent, token = draw(st.integers(ROOT, len(found) - 1)), draw(tokens)
        if (parent, token) not in zip(parents, found, strict=True):
            found.append(token)
            parents.append(parent)
    return Draft(tuple(found), tuple(parents))


def united(
    draft: Draft,
    nodes: int = MANY,
    least_survival: float = 0.0,
    rates: LearnedRates | None = None,
    text: list[int] = TEXT,
) -> Draft:
    return after(DraftUnion([SuffixIndex()]), text, draft, rates or LearnedRates(), nodes, least_survival)


def after(
    union: DraftUnion,
    text: list[int],
    draft: Draft,
    rates: LearnedRates,
    nodes: int = MANY,
    least_survival: float = 0.0,
) -> Draft:
    """Returns the union once it has taken all of the text in."""
    union.take_in(text, len(text))
    return union.united(text, draft, rates, nodes, least_survival, ())


def taught(*, index_is_right: bool) -> LearnedRates:
    """Returns what is learned from a text in which either the index or the other drafter is right."""
    rates, text, union = LearnedRates(), TEXT, DraftUnion([SuffixIndex()])
    for number in range(60):
        after(union, text, Draft.chain([100 + number]), rates)
        text = [*text, text[-len(REPEATED) - 1] if index_is_right else 100 + number]
    return rates


def paths(draft: Draft) -> set[tuple[int, ...]]:
    """Returns the tokens from the root down to each node."""
    return {tuple(draft.tokens[above] for above in draft.path(node)) for node in range(len(draft))}


def test_union_of_new_text_is_the_draft() -> None:
    draft = Draft((5, 6, 7, 8), (ROOT, 0, ROOT, 0))
    new = united(draft, len(draft), text=[1, 2, 3])
    assert paths(new) == paths(draft)
    assert new.tokens[: new.chain_length] == draft.tokens[: draft.chain_length]


def test_union_with_equal_guesses_is_the_draft() -> None:
    draft = Draft.chain(FOUND)
    assert united(draft) == draft


def test_union_goes_on_beyond_a_draft_that_the_index_agrees_with() -> None:
    assert united(Draft.chain(FOUND[:2])) == Draft.chain(FOUND)


@given(st.lists(tokens, min_size=1, max_size=12), drafts(), st.lists(tokens, max_size=20))
def test_union_with_room_for_both_has_all_paths_of_the_draft_and_of_the_index(
    text: list[int], draft: Draft, said: list[int]
) -> None:
    both, found = united(draft, text=text), united(Draft(), text=text)
    assert paths(both) == paths(draft) | paths(found)
    assert len(both.path_of(said)) == max(len(draft.path_of(said)), len(found.path_of(said)))


@given(st.lists(tokens, min_size=1, max_size=12), drafts(), st.integers(0, 6))
def test_union_has_no_more_nodes_than_were_asked_for(text: list[int], draft: Draft, nodes: int) -> None:
    assert len(united(draft, nodes, text=text)) <= nodes


def test_union_has_no_more_nodes_than_a_captured_graph_takes() -> None:
    wide = Draft(tuple(range(100, 100 + MANY)), (ROOT,) * MANY)
    assert len(united(wide)) == MAX_UNION_NODES


def test_union_takes_the_nodes_that_survive_often_enough_and_at_least_the_best() -> None:
    draft = Draft.chain([7, 8])
    counts = [len(united(draft, 2, least)) for least in (1.0, 0.45, 0.01)]
    assert counts[:2] == [1, 2]  # they survive with 0.7 and 0.49 until more is known
    assert counts[2] > 2  # guesses of the index too


def test_draft_without_an_index_keeps_the_nodes_that_promise_enough() -> None:
    draft, promises = Draft((5, 6, 7, 8, 9), (ROOT, 0, 1, ROOT, 3)), (0.9, 0.5, 0.1, 0.3, 0.9)

    def kept(least: float) -> Draft:
        return DraftUnion().united([1], draft, LearnedRates(), len(draft), least, (), promises)

    assert kept(0.25) == Draft((5, 6, 8), (ROOT, 0, ROOT))
    assert kept(0.99) == Draft.chain([5])
    assert kept(0.0) == draft


def test_promises_that_are_broken_count_for_less() -> None:
    rates, union, text = LearnedRates(), DraftUnion(), [1]

    def kept(token: int) -> int:
        return len(union.united(text, Draft.chain([token, token]), rates, 2, 0.5, (), (0.9, 0.9)))

    assert kept(5) == 2
    for _ in range(60):
        kept(5)
        text = [*text, 4]
    assert kept(5) == 1


def test_union_begins_with_the_path_of_the_source_that_was_right() -> None:
    draft = Draft.chain([7])
    of_index = united(draft, rates=taught(index_is_right=True))
    of_draft = united(draft, rates=taught(index_is_right=False))
    assert of_index.tokens[: of_index.chain_length] == FOUND
    assert of_draft.tokens[: of_draft.chain_length] == (7,)


def test_union_leaves_out_what_was_never_right() -> None:
    rates = taught(index_is_right=False)
    assert united(Draft.chain([7]), 1, 0.2, rates) == Draft.chain([7])
    assert len(united(Draft.chain([7]), 1, 0.2)) == 1  # as likely as not known
    assert len(united(Draft.chain([7]), 1, 0.2, taught(index_is_right=True))) > 1


def test_union_learns_from_guesses_that_were_not_worth_a_node() -> None:
    rates, text, union = LearnedRates(), TEXT, DraftUnion([SuffixIndex()])
    for number in range(60):
        assert len(after(union, text, Draft.chain([100 + number]), rates, 1)) == 1
        text = [*text, text[-len(REPEATED) - 1]]
    assert united(Draft.chain([7]), rates=rates).tokens[0] == FOUND[0]


def test_union_guesses_nothing_after_an_end() -> None:
    end = FOUND[2]
    union = DraftUnion([SuffixIndex()])
    union.take_in(TEXT, len(TEXT))
    found = union.united(TEXT, Draft(), LearnedRates(), MANY, 0.0, {end})
    assert found == Draft.chain(FOUND[:3])


def test_union_guesses_no_deeper_than_a_pace_allows() -> None:
    text = [*range(100, 140), *range(100, 120)]
    assert united(Draft(), text=text).depth == DEEPEST


def test_union_takes_a_long_text_in_by_parts_and_then_guesses() -> None:
    rates, union = LearnedRates(), DraftUnion([SuffixIndex()])
    assert union.take_in(TEXT, len(TEXT) - 1) == len(TEXT) - 1
    assert not union.united(TEXT, Draft(), rates, MANY, 0.0, ())
    assert union.take_in(TEXT, 100) == 1
    assert union.united(TEXT, Draft(), rates, MANY, 0.0, ()) == Draft.chain(FOUND)


def test_union_after_a_change_of_drafter_teaches_the_one_that_guessed() -> None:
    before, now, union = LearnedRates(), LearnedRates(), DraftUnion([SuffixIndex()])
    after(union, TEXT, Draft.chain([7]), before)
    after(union, [*TEXT, 7], Draft.chain([8]), now)
    assert before._rates
    assert not now._rates


PREDICTED = (50, 51, 52)
OF_BOTH = [PRIOR_RATES_OF_PREDICTIONS, PRIOR_RATES]


def with_prediction(prediction: tuple[int, ...] = PREDICTED) -> DraftUnion:
    """Returns the union of a prediction, which begins after TEXT, with what the text says."""
    return DraftUnion([PredictionIndex(prediction, len(TEXT)), SuffixIndex()])


def test_union_of_two_indices_has_the_paths_of_both_and_of_the_draft() -> None:
    found = after(with_prediction(), TEXT, Draft.chain([7, 8]), LearnedRates(OF_BOTH))
    expected = paths(Draft.chain(PREDICTED)) | paths(Draft.chain(FOUND)) | paths(Draft.chain([7, 8]))
    assert paths(found) == expected


def test_union_follows_the_index_that_was_right_whatever_the_priors_say() -> None:
    rates, text, union = LearnedRates(OF_BOTH), TEXT, with_prediction((50,) * 100)
    assert after(with_prediction(), TEXT, Draft(), rates).tokens[:3] == PREDICTED
    for _ in range(60):
        after(union, text, Draft(), rates)
        text = [*text, text[-len(REPEATED) - 1]]
    assert after(with_prediction(), TEXT, Draft(), rates).tokens[: len(FOUND)] == FOUND


class Fixed:
    """An index that guesses what it is told to."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = tokens
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, tokens: list[int]) -> None:
        self._length += len(tokens)

    def propose(self, depth: int) -> Draft:
        return Draft.chain(self._tokens)

    def guess(self, depth: int) -> Continuation:
        return Continuation(self._tokens, matched=1)


def learned(said: list[tuple[list[Fixed], tuple[int, ...]]]) -> LearnedRates:
    """Returns what is learned of two indices: what they guess, and what the text says then."""
    rates = LearnedRates([PRIOR_RATES] * 2)
    for indices, tokens in said * 40:
        union = DraftUnion([Fixed(*index._tokens) for index in indices])
        after(union, [1], Draft(), rates)
        after(union, [1, *tokens], Draft(), rates)
    return rates


def test_union_learns_of_each_index_by_itself() -> None:
    rates = learned([([Fixed(5, 6), Fixed(7, 8)], (7, 8))])
    found = after(DraftUnion([Fixed(5, 6), Fixed(7, 8)]), [1], Draft(), rates, MANY, 0.6)
    assert found == Draft.chain([7, 8])


def test_union_trusts_a_guess_of_both_indices_more_than_a_guess_of_either() -> None:
    rates = learned([([Fixed(5, 6), Fixed(5, 6)], (5, 6)), ([Fixed(5, 6), Fixed(7, 8)], (9, 9))])
    agreed = after(DraftUnion([Fixed(5, 6), Fixed(5, 6)]), [1], Draft(), rates, MANY, 0.6)
    assert agreed == Draft.chain([5, 6])
    assert len(after(DraftUnion([Fixed(5, 6), Fixed(7, 8)]), [1], Draft(), rates, MANY, 0.6)) == 1


def test_union_guesses_from_past_answers_which_enter_before_the_text() -> None:
    past, text = (*REPEATED, END, 5, 6, END), [7, *REPEATED[:3]]
    union = DraftUnion([SuffixIndex()], past)
    assert union.take_in(text, len(past) + 1) == len(past) + 1
    assert not union.united(text, Draft(), LearnedRates(), MANY, 0.0, ())
    assert union.take_in(text, 100) == len(text) - 1
    assert union.united(text, Draft(), LearnedRates(), MANY, 0.0, ()) == Draft.chain(REPEATED[3:6])


def test_union_never_guesses_the_end_of_a_past_answer() -> None:
    union = DraftUnion([SuffixIndex(), NgramIndex()], (*REPEATED[:4], END))
    union.take_in([], MANY)
    assert after(union, [3, *REPEATED[1:4]], Draft(), LearnedRates([PRIOR_RATES] * 2)) == Draft()
