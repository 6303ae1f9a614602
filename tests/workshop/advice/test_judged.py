"""Rounds are counted as the target would have run them."""

from random import Random

import pytest

from outrider.drafters.occurrences import Continuation
from workshop.advice.judged import Counts, DraftStart, JudgedAnswer, counted, counted_mixed

TOKENS = tuple(range(10, 19))  # nine; rounds begin at the second


def judged(*correct: int, drafted: int = 4, tokens: tuple[int, ...] = TOKENS) -> JudgedAnswer:
    """correct: of the Drafts before the second token, the third, ..."""
    starts = [DraftStart(0, 0), *(DraftStart(drafted, count) for count in correct)]
    starts += [DraftStart(drafted, 0)] * (len(tokens) - len(starts))
    return JudgedAnswer(tokens, tuple(starts))


def test_round_gives_what_was_right_and_a_token_of_the_target() -> None:
    counts = counted([judged(2, 0, 0, 1)], depth=4)  # 3 tokens, 2, then 1 at a time
    assert (counts.rounds, counts.tokens) == (5, 8)
    assert counts.tokens_per_pass == 8 / 5
    assert counts.accepted == [2, 1, 0, 0]
    assert counts.reached == [4, 2, 1, 0]  # the last token of all is the target's own


def test_shallower_draft_is_the_beginning_of_a_deeper_one() -> None:
    deep = judged(4, 3, 2, 1, 0, 3, 2, 1)
    assert counted([deep], depth=4).rounds == 2
    counts = counted([deep], depth=1)
    assert (counts.rounds, counts.tokens, counts.drafted) == (5, 8, 5)
    assert counts.rates == [0.75]


def test_rounds_end_with_the_answer() -> None:
    counts = counted([judged(*[4] * 8)], depth=4)
    assert (counts.rounds, counts.tokens) == (2, 8)
    assert counts.reached == [2, 2, 1, 1]


@pytest.mark.parametrize("tokens", [(), (1,)])
def test_answer_of_the_prompts_pass_alone_has_no_round(tokens: tuple[int, ...]) -> None:
    counts = counted([JudgedAnswer(tokens, (DraftStart(0, 0),) * len(tokens))], depth=3)
    assert (counts.rounds, counts.tokens_per_pass, counts.acceptance_rate) == (0, 1.0, 0.0)
    assert counts.rates == [None] * 3


def test_counted_covers_each_token_but_the_first_once() -> None:
    random = Random(1)
    for _ in range(50):
        tokens = tuple(range(random.randint(2, 40)))
        one = judged(*(random.randint(0, 4) for _ in tokens[1:]), tokens=tokens)
        for depth in range(1, 5):
            assert counted([one, one], depth).tokens == 2 * (len(tokens) - 1)


def mixed(promised: float, correct: int) -> Counts:
    """Counts of an index that promises this much for each of four tokens, with a model correct in two."""
    text = tuple(range(60))
    model = JudgedAnswer(text, (DraftStart(4, 2),) * len(text))
    guess = Continuation((1, 2, 3, 4), tuple(promised**length for length in range(1, 5)))
    index = JudgedAnswer(text, (DraftStart(4, correct),) * len(text), (guess,) * len(text))
    return counted_mixed([model], [index], depth=4)


def test_index_drafts_where_it_promises_more() -> None:
    assert mixed(promised=0.1, correct=0).asked_share == 1.0
    assert mixed(promised=1.0, correct=4).asked_share < 1.0


def test_index_that_breaks_its_promises_is_not_believed_for_long() -> None:
    counts = mixed(promised=0.95, correct=0)
    assert counts.tokens_per_pass > 2.0
    assert counts.asked_share > 0.5
