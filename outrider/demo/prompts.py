"""Prompts held out from the demo pair's training text, by kind."""

import json
from functools import cache
from pathlib import Path

KINDS = (
    "code",
    "prose",
    "json",
    "question_answer",
    "stories",
    "arithmetic",
    "conversations",
    "tool_calls",
    "schema_answers",
)
DEMO = Path(__file__).parent / "pair"


@cache
def held_out() -> dict[str, list[str]]:
    """Returns every held-out prompt by kind, as the training script wrote them next to the pair."""
    prompts: dict[str, list[str]] = json.loads((DEMO / "prompts.json").read_text())
    return prompts


def prompts(kind: str, count: int) -> list[str]:
    """Returns the first `count` held-out prompts of a kind.

    Raises:
        ValueError: the kind is not one of KINDS, or fewer than `count` prompts exist.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; accepted: {', '.join(KINDS)}")
    available = held_out()[kind]
    if not 0 <= count <= len(available):
        raise ValueError(f"count is {count}; accepted: 0 to {len(available)} prompts of kind {kind!r}")
    return available[:count]
