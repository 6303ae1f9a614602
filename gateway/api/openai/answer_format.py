"""Format of a model's answers: which part is text, which part is thinking, which part calls a tool.

The response template of a tokenizer describes it in transformers' notation. For tokenizers without a response
template, the format is made of what many models share, recognized by marks in the chat template.
"""

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from gateway.api.openai.calls.formats import (
    GEMMA_4,
    HARMONY,
    KIMI_3,
    CallFormat,
    found_in,
    of_response_template,
)
from gateway.generation.form import Form, Thoughts, mark

CALLS = "tool_calls"
THINKING = ("reasoning_content", "reasoning", "thinking")  # names of the field for thinking in templates
TURN = (
    r"<\|(im_start|start_header_id)\|>assistant(<\|end_header_id\|>\n)?\n|\[/INST\]|<\|assistant\|>"
    r"|<｜Assistant｜>|<\|im_assistant\|>assistant<\|im_middle\|>|\]~b\]ai\n|<\|turn>model\n"
    r"|<start_of_turn>model\n|<\|start\|>assistant|<\|open\|>message role=\"assistant\"<\|sep\|>"
    r"|<\|header_start\|>assistant<\|header_end\|>\n\n|<\|start_of_role\|>assistant[^<\n]*<\|end_of_role\|>"
)
THOUGHTS = {"open": "<think>", "close": "</think>"}
# Marks of thoughts; key: text in the chat template by which they are recognized.
MARKS = {
    "[THINK]": {"open": "[THINK]", "close": "[/THINK]"},
    "<think>": THOUGHTS,
    "Here is my thought process:": {"open": "Here is my thought process:", "close": "Here is my response:"},
}


@dataclass(frozen=True)
class Channels:
    """Marks around the parts of an answer, for a family of models that marks its text too.

    ``text`` and ``thoughts`` are fields of a response template; the other attributes are as in
    ``AnswerFormat``.
    """

    text: dict[str, Any]
    thoughts: dict[str, Any]
    after_thoughts: str
    before_text: str


# The text of harmony's answers is the final channel, and commentary to the user between calls.
HARMONY_CHANNELS = Channels(
    {
        "open_pattern": r"<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>\s*\w+)?\s*<\|message\|>",
        "close_pattern": r"<\|end\|>|<\|return\|>|<\|call\|>",
    },
    {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
    "<|start|>assistant",
    "<|channel|>final<|message|>",
)
KIMI_3_CHANNELS = Channels(
    {"open": "<|open|>response<|sep|>", "close": "<|close|>response<|sep|>"},
    {"open": "<|open|>think<|sep|>", "close": "<|close|>think<|sep|>"},
    "<|open|>response<|sep|>",
    "<|open|>response<|sep|>",
)
CHANNELS = {HARMONY: HARMONY_CHANNELS, KIMI_3: KIMI_3_CHANNELS}


@dataclass(frozen=True)
class AnswerFormat:
    """Format by which answers are parsed, and their parts are constrained to a form."""

    template: dict[str, Any]  # response template in transformers' notation
    calls: CallFormat | None = None  # None: no grammar knows the format of calls, or the model makes no calls
    after_thoughts: str = ""  # text between thoughts and the answer
    before_text: str = ""  # marks before the text of an answer

    @property
    def thoughts(self) -> dict[str, Any]:
        """Marks of thoughts, as the field of a response template; empty: the model has no thoughts."""
        fields = self.template["fields"]
        return next((fields[name] for name in THINKING if name in fields), {})

    @property
    def has_calls(self) -> bool:
        """Whether answers can call tools."""
        return CALLS in self.template["fields"]

    def held(self, form: Form, answer_start: str, added: Mapping[str, int], *, is_text: bool = True) -> Form:
        """Returns the form with what precedes it in an answer: thoughts, and the mark of the text.

        Args:
            answer_start, added: as for ``thoughts_before``.
            is_text: whether the form may be that of a text; False: it is that of calls, which have their own
                marks.
        """
        begins = (answer_start, self.after_thoughts)
        is_written = any(text.endswith(self.before_text) for text in begins)
        opening = "" if is_written or not is_text else mark(self.before_text, added)
        return replace(form, thoughts=self.thoughts_before(answer_start, added), opening=opening)

    def thoughts_before(self, answer_start: str, added: Mapping[str, int]) -> Thoughts | None:
        """Returns the marks of thoughts; None: no thoughts come, they end in the prompt, or their marks vary.

        Args:
            answer_start: end of the prompt that already belongs to the answer.
            added: ids of added tokens by their text.
        """
        opening, close = self.thoughts.get("open"), self.thoughts.get("close")
        if not isinstance(opening, str) or not isinstance(close, str):
            return None
        if self.before_text and answer_start.endswith(self.before_text):
            return None
        from transformers.utils.chat_parsing import ResponseParser  # takes a second, and only chats need it

        events = ResponseParser(self.template, prefix=answer_start).initial_events
        written = [event["type"] for event in events if event["field"] in THINKING]
        behind = mark(close + self.after_thoughts, added)
        if written:
            return None if written[-1] == "region_close" else Thoughts(None, behind)
        *_, begun = re.split(TURN, answer_start)
        return None if begun is not None and close in begun else Thoughts(mark(opening, added), behind)


def of_template(template: dict[str, Any]) -> AnswerFormat:
    """Returns the format that a response template describes."""
    return AnswerFormat(template, of_response_template(template["fields"].get(CALLS, {})))


def of_chat_template(source: str) -> AnswerFormat | None:
    """Returns the format that fits a chat template; None: unknown."""
    calls = found_in(source)
    channels = CHANNELS.get(calls) if calls else None
    fields: dict[str, Any] = {"content": {} if channels is None else channels.text}
    if calls is not None:
        fields[CALLS] = calls.region()
    if thoughts := _thoughts_in(source, calls) if channels is None else channels.thoughts:
        fields[THINKING[0]] = thoughts
    if len(fields) == 1:
        return None
    template = {
        "version": 1,
        "start_anchor_pattern": TURN,
        "defaults": {"role": "assistant"},
        "fields": fields,
    }
    if channels is None:
        return AnswerFormat(template, calls)
    return AnswerFormat(template, calls, channels.after_thoughts, channels.before_text)


def _thoughts_in(source: str, calls: CallFormat | None) -> dict[str, Any] | None:
    if calls is GEMMA_4:
        return {"open": "<|channel>thought\n", "close": "<channel|>"}
    return next((marks for text, marks in MARKS.items() if text in source), None)


def thinking_marks(answers: AnswerFormat | None) -> set[str]:
    """Returns the fixed texts that begin and end thoughts."""
    thoughts = {} if answers is None else answers.thoughts
    found = {marks.get(end) for marks in (thoughts, THOUGHTS) for end in ("open", "close")}
    return {text for text in found if isinstance(text, str)}


def with_raw_calls(template: dict[str, Any]) -> dict[str, Any]:
    """Returns the template with calls kept as text, so that malformed and partial calls are not lost."""
    raw = deepcopy(template)
    calls = raw["fields"].get(CALLS)
    if calls is not None:
        for name in ("content_args", "transform_each", "join"):
            calls.pop(name, None)
        raw["fields"][CALLS] = {**calls, "content": "text", "transform": {"text": "{content}"}}
    return raw


def marks(answers: AnswerFormat, special_tokens: list[str]) -> frozenset[str]:
    """Returns the special tokens by which answers are parsed, so that their text must contain them."""
    calls = "" if answers.calls is None else f"{answers.calls}"
    written = (json.dumps(answers.template, ensure_ascii=False) + calls).replace("\\", "")
    return frozenset(token for token in special_tokens if token in written)
