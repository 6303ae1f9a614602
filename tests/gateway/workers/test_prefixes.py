"""Prefixes remember the worker that took in each beginning of a prompt."""

from gateway.workers import prefixes
from gateway.workers.prefixes import SPAN, Prefixes

PROMPT = tuple(range(4 * SPAN))


def test_prefixes_several_known_beginnings_use_the_longest():
    known = Prefixes()
    known.note(PROMPT[: 2 * SPAN], "short")
    known.note((*PROMPT[:SPAN], 9, *PROMPT), "branched")
    known.note(PROMPT[: 3 * SPAN], "long")
    known.note(PROMPT[:SPAN], "newest")
    assert known.holder(PROMPT) == "long"
    assert known.holder(PROMPT[: SPAN + 1]) == "newest"


def test_prefixes_prompt_below_a_span_has_no_holder():
    known = Prefixes()
    known.note(PROMPT[: SPAN - 1], "a")
    assert known.holder(PROMPT[: SPAN - 1]) is None
    assert known.holder(PROMPT) is None


def test_prefixes_full_forget_the_least_recently_used(monkeypatch):
    monkeypatch.setattr(prefixes, "REMEMBERED", 2)
    known = Prefixes()
    known.note((1,) * SPAN, "a")
    known.note((2,) * SPAN, "b")
    known.note((1,) * SPAN, "a")
    known.note((3,) * SPAN, "c")
    assert [known.holder((n,) * SPAN) for n in (1, 2, 3)] == ["a", None, "c"]
