"""Tokens of thoughts in the usage: their marks count, and it does not matter how an answer was cut."""

import json

import pytest

from gateway.api.openai.answer_format import of_chat_template
from gateway.api.openai.answer_parser import AnswerParser
from gateway.api.openai.chat_template import ChatTemplate
from tests.fakes.scripted import ScriptedTarget
from tests.support.http_calls import client_of, events_of

TURN = "<|im_start|>assistant\n"
QWEN = of_chat_template("<think><|im_start|>assistant")
HARMONY = of_chat_template("<|channel|><|call|><|start|>assistant")
FINAL = ["<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "Yes", "."]
ANSWERS = {
    "marks are tokens": (QWEN, TURN, ["<think>", "h", "m", "</think>", "\n\n", "Yes"], 4),
    "marks are several tokens": (QWEN, TURN, ["<thi", "nk>", "hm", "</th", "ink>", "Yes"], 5),
    "begun by the prompt": (QWEN, f"{TURN}<think>\n", ["h", "m", "</think>", "Yes"], 3),
    "ended by the prompt": (QWEN, f"{TURN}<think></think>", ["Yes", "."], 0),
    "unfinished": (QWEN, TURN, ["<think>", "h", "m"], 3),
    "tokens without text": (QWEN, TURN, ["<think>", "", "", "é", "</think>", "", "é"], 5),
    "a mark that is none": (QWEN, TURN, ["<thi", "s", "<think", "> no", "</think>", "x"], 3),
    "a channel": (
        HARMONY,
        "<|start|>assistant",
        ["<|channel|>", "analysis", "<|message|>", "hm", "<|end|>"],
        5,
    ),
}


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("name", ANSWERS)
def test_thought_tokens_are_counted_with_their_marks(name, size):
    answers, prefix, pieces, expected = ANSWERS[name]
    pieces = [*pieces, *FINAL] if answers is HARMONY else pieces
    parser = AnswerParser(answers, prefix, [], None)
    for first in range(0, len(pieces), size):
        parser.feed(pieces[first : first + size], ends=first + size >= len(pieces))
    assert parser.thought_tokens == expected


THOUGHTS = b"<think>so</think>"
SAID = [*THOUGHTS, *b"Yes."]
TEMPLATE = ChatTemplate("<think>{{ messages[0].content }}[/INST]", {})
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": len(SAID)}


async def usage_of(tokenizer, path, body):
    async with client_of(tokenizer, ScriptedTarget(SAID), template=TEMPLATE) as client:
        return (await client.post(f"/v1/{path}", json=body)).json()["usage"]


@pytest.mark.parametrize(
    ("more", "answers"),
    [({}, 1), ({"n": 2}, 2), ({"include_reasoning": False}, 1)],
    ids=["one answer", "two answers", "hidden"],
)
async def test_chat_tells_its_reasoning_tokens(tokenizer, more, answers):
    usage = await usage_of(tokenizer, "chat/completions", {**CHAT, **more})
    assert usage["completion_tokens_details"]["reasoning_tokens"] == answers * len(THOUGHTS)


async def test_streamed_chat_tells_its_reasoning_tokens_at_the_end(tokenizer):
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    async with client_of(tokenizer, ScriptedTarget(SAID), template=TEMPLATE) as client:
        *_, last, _ = events_of(await client.post("/v1/chat/completions", json=body))
    told = json.loads(last)["usage"]["completion_tokens_details"]
    assert told["reasoning_tokens"] == len(THOUGHTS)


async def test_response_tells_its_reasoning_tokens(tokenizer):
    usage = await usage_of(tokenizer, "responses", {"input": "x", "max_output_tokens": len(SAID)})
    assert usage["output_tokens_details"] == {"reasoning_tokens": len(THOUGHTS)}


async def test_message_tells_its_thinking_tokens(tokenizer):
    usage = await usage_of(tokenizer, "messages", CHAT)
    assert usage["output_tokens_details"] == {"thinking_tokens": len(THOUGHTS)}
