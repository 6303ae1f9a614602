"""Thoughts of a model before its answer: the form of an answer applies after them."""

from collections.abc import Mapping
from typing import Any

from gateway.api.openai.response_template import THINKING
from gateway.generation.form import Thoughts, mark


def thoughts_before(
    template: dict[str, Any] | None, answer_start: str, added: Mapping[str, int]
) -> Thoughts | None:
    """Returns the marks of thoughts; None if there are none, they end in the prompt, or their marks vary.

    Args:
        template: the model's response template.
        answer_start: beginning of the answer in the prompt, perhaps with thoughts or with their end.
        added: ids of the tokenizer's added tokens.
    """
    fields = {} if template is None else template["fields"]
    thinking: dict[str, Any] = next((fields[name] for name in THINKING if name in fields), {})
    opening, close = thinking.get("open"), thinking.get("close")
    if not isinstance(opening, str) or not isinstance(close, str):
        return None
    from transformers.utils.chat_parsing import ResponseParser  # takes a second, and only chats need it

    events = ResponseParser(template, prefix=answer_start).initial_events
    written = [event["type"] for event in events if event["field"] in THINKING]
    if not written:
        return Thoughts(mark(opening, added), mark(close, added))
    return None if written[-1] == "region_close" else Thoughts(None, mark(close, added))
