"""Which of its two states a sequence goes on from, and which it writes over."""

import pytest

from outrider.engine.held_state import RECORDS, HeldState


def fed(held: HeldState, start: int, count: int, committed: int) -> int:
    """Tokens that the state has seen with which a pass begins."""
    use = held.begin(start, count, committed)
    held.finish(use)
    return use.first


def test_pass_begins_with_the_state_after_committed_tokens_and_not_after_drafted_tokens() -> None:
    held = HeldState(0)
    assert fed(held, 0, 100, 100) == 0
    assert fed(held, 100, 5, 101) == 100  # a token and four nodes of a Draft
    assert fed(held, 103, 1, 104) == 101  # two nodes were accepted: they are replayed


def test_pass_that_failed_begins_where_it_began() -> None:
    held = HeldState(0)
    fed(held, 0, 100, 100)
    held.begin(100, 500, 600)
    assert fed(held, 100, 250, 350) == 100
    assert fed(held, 350, 250, 600) == 350


def test_pass_that_was_finished_can_be_repeated() -> None:
    held = HeldState(0)
    fed(held, 0, 100, 100)
    fed(held, 100, 500, 600)
    assert fed(held, 100, 500, 600) == 100


def test_state_of_tokens_that_were_taken_back_is_not_read_when_others_are_in_their_place() -> None:
    held = HeldState(0)
    fed(held, 0, 10, 10)
    held.forget_after(8)
    fed(held, 8, 4, 0)
    assert fed(held, 10, 1, 0) == 0


def test_sequence_resumes_from_its_older_state_on_and_not_before() -> None:
    held = HeldState(0)
    for place in range(3 * RECORDS + 8):
        fed(held, place, 1, place + 1)
    older = min(held.lengths)
    assert 0 < older < held.end - 1
    assert all(held.resumes_at(place) for place in range(older, held.end + 1))
    assert not held.resumes_at(older - 1)
    with pytest.raises(ValueError, match=f"no recurrent state is left before token {older - 1}"):
        held.begin(older - 1, 1, older)
