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


def test_pass_stores_the_states_at_ends_that_its_committed_tokens_reach_and_no_others() -> None:
    held = HeldState(0, ends={96: 5, 104: 6, 112: 7})
    use = held.begin(0, 108, 103)  # five tokens are drafted
    assert use.ends == {96: 5}
    assert not held.stored
    held.finish(use)
    assert held.stored == {96}
    use = held.begin(105, 10, 106)  # two of them were accepted: they are replayed
    assert use.ends == {104: 6}


def test_end_of_a_pass_that_is_repeated_is_not_stored_until_that_ends() -> None:
    held = HeldState(0, ends={96: 5})
    held.finish(held.begin(0, 100, 100))
    use = held.begin(0, 100, 100)
    assert use.ends == {96: 5}
    assert not held.stored


def test_sequence_that_resumes_from_a_kept_state_has_no_records_before() -> None:
    held = HeldState(0)
    held.resume(32)
    assert held.resumes_at(0)
    assert not any(held.resumes_at(place) for place in range(1, 32))
    assert fed(held, 32, 4, 36) == 32
    assert not any(held.resumes_at(place) for place in range(1, 32))
    assert held.resumes_at(35)
