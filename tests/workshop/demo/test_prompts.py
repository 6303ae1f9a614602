"""Held-out prompts: the same at every call, some for every kind."""

import pytest

from outrider.demo.prompts import KINDS, prompts


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_distinct_and_stable(kind: str) -> None:
    some = prompts(kind, 48)
    assert len(set(some)) == 48
    assert prompts(kind, 5) == some[:5]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_end_without_a_space(kind: str) -> None:
    assert all(prompt == prompt.rstrip() != "" for prompt in prompts(kind, 48))


def test_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"kind is 'poetry'; accepted: code, prose, json"):
        prompts("poetry", 1)


def test_prompts_beyond_the_last_are_refused() -> None:
    with pytest.raises(ValueError, match=r"count is 1000; accepted: 0 to 48"):
        prompts("code", 1000)
