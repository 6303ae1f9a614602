"""Ids of calls, in the form that the chat templates of each family accept."""

import re
import uuid
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Literal

Style = Literal["any", "nine", "counted"]

NINE = re.compile("[a-zA-Z0-9]{9}")  # the only ids that Mistral's templates accept


def new_id(style: Style, name: str, number: int) -> str:
    """Returns the id of a new call. number: number of earlier calls in the conversation."""
    if style == "counted":
        return f"functions.{name}:{number}"
    made = uuid.uuid4().hex
    return made[:9] if style == "nine" else f"call_{made}"


def with_own_ids(messages: Sequence[dict[str, Any]], style: Style) -> list[dict[str, Any]]:
    """Returns the messages with ids that the template accepts, equal for a call and its result."""
    if style == "any":
        return list(messages)
    ids: dict[str, str] = {}
    number = 0
    renamed = []
    for message in messages:
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                ids[call["id"]] = _own_id(style, call, number)
                calls.append({**call, "id": ids[call["id"]]})
                number += 1
            message = {**message, "tool_calls": calls}
        elif "tool_call_id" in message:
            told = message["tool_call_id"]
            message = {**message, "tool_call_id": ids.get(told, told)}
        renamed.append(message)
    return renamed


def count_calls(messages: Sequence[dict[str, Any]]) -> int:
    """Returns the number of calls in a conversation."""
    return sum(len(message.get("tool_calls", ())) for message in messages)


def _own_id(style: Style, call: dict[str, Any], number: int) -> str:
    if style == "counted":
        return new_id(style, call["function"]["name"], number)
    told: str = call["id"]
    return told if NINE.fullmatch(told) else sha256(told.encode()).hexdigest()[:9]
