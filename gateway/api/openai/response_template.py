"""Format in which a model writes its answers: which part is text, which is thinking, which calls a tool.

The response template of a tokenizer describes it for transformers. For tokenizers without one, this file has
the formats that many models share, recognized by a mark in the chat template.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from gateway.generation.form import Thoughts, mark

CALLS = "tool_calls"
THINKING = ("reasoning_content", "reasoning", "thinking")  # names of the field, as templates have it
TURN = r"<\|(im_start|start_header_id)\|>assistant(<\|end_header_id\|>\n)?\n|\[/INST\]|<\|assistant\|>"
CALL = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}}
OF_LIST = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
OF_LLAMA = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.parameters}"}}
LLAMA = "<|python_tag|>"
THOUGHTS = {"open": "<think>", "close": "</think>"}

# Formats of calls by a mark in the chat template. The first mark that occurs counts.
FORMATS: dict[str, dict[str, Any]] = {
    # Hermes, Qwen 2.5 and 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    "<tool_call>": {
        "open": "<tool_call>",
        "close": "</tool_call>",
        "content": "json",
        "repeats": True,
        "transform": CALL,
    },
    # Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
    "[TOOL_CALLS]": {
        "open": "[TOOL_CALLS]",
        "close": "</s>",
        "content": "json",
        "transform": OF_LIST,
        "transform_each": True,
    },
    # Llama 3: an answer that is {"name": ..., "parameters": {...}}, with a mark before it or without
    LLAMA: {
        "open_pattern": r"<\|python_tag\|>\s*|\A\s*(?=\{\s*\"name\")",
        "close_pattern": r"<\|eom_id\|>|<\|eot_id\|>|\s*;\s*(?=\{)",
        "content": "json",
        "repeats": True,
        "transform": OF_LLAMA,
    },
}
OTHER_CALLS = ("<function=", "[ARGS]", "<arg_key>")  # marks of formats that FORMATS would misread


def of_chat_template(source: str) -> dict[str, Any] | None:
    """Returns the response template that fits a chat template; None: unknown."""
    thinks = "<think>" in source
    known = next((known for known in FORMATS if known in source), None)
    if any(other in source for other in OTHER_CALLS):
        known = None
    if known is None and not thinks:
        return None
    fields: dict[str, Any] = {"content": {}}
    if known is not None:
        fields[CALLS] = FORMATS[known]
    if thinks:
        fields[THINKING[0]] = THOUGHTS
    return {"version": 1, "start_anchor_pattern": TURN, "defaults": {"role": "assistant"}, "fields": fields}


def thinking_marks(template: dict[str, Any] | None) -> set[str]:
    """Returns the fixed texts that begin and end thoughts."""
    fields = {} if template is None else template["fields"]
    thinking = [fields[name] for name in THINKING if name in fields]
    found = {marks.get(end) for marks in [*thinking, THOUGHTS] for end in ("open", "close")}
    return {text for text in found if isinstance(text, str)}


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


def with_raw_calls(template: dict[str, Any]) -> dict[str, Any]:
    """Returns the template with calls as text, so that malformed calls and parts of calls are not lost."""
    raw = deepcopy(template)
    calls = raw["fields"].get(CALLS)
    if calls is not None:
        for name in ("content_args", "transform_each", "join"):
            calls.pop(name, None)
        raw["fields"][CALLS] = {**calls, "content": "text", "transform": {"text": "{content}"}}
    return raw


def marks(template: dict[str, Any], special_tokens: list[str]) -> frozenset[str]:
    """Returns the special tokens that the template matches, which its text must contain."""
    written = json.dumps(template, ensure_ascii=False).replace("\\", "")
    return frozenset(token for token in special_tokens if token in written)
