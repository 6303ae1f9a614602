"""The chat format: what transformers and the gateway make of a template, and how a tool call is read."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import AutoTokenizer

from gateway.api.openai.chat_template import load_chat_template
from workshop.demo.chat import assistant, render, system, user
from workshop.demo.generated import GENERATORS
from workshop.demo.tokenizer import save_tokenizer, train_tokenizer
from workshop.demo.tools import TOOLS

WEATHER = next(tool for tool in TOOLS if "get_weather" in tool.names).definition("get_weather")
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random, folder = Random(1), tmp_path_factory.mktemp("tokenizer")
    texts = [
        "".join(GENERATORS[kind](random)) for kind in ("tool_calls", "schema_answers") for _ in range(50)
    ]
    save_tokenizer(train_tokenizer(texts), folder, 2048)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def test_chat_turns_follow_one_another() -> None:
    chat = [system("Answer briefly."), user("Hello!"), assistant("Hello."), user("Who are you?")]
    text = "<|system|>Answer briefly.<|end|><|user|>Hello!<|end|><|assistant|>Hello.<|end|>"
    assert render(chat, [], begin_answer=False) == f"{text}<|user|>Who are you?<|end|>"
    assert render(chat, [], begin_answer=True) == f"{text}<|user|>Who are you?<|end|><|assistant|>"


def test_tools_stand_in_the_first_turn_and_their_calls_in_tags(tokenizer: Any) -> None:
    chat = [
        system("Use the tools."),
        user("What is the weather in Rome?"),
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"sky": "sunny"}'},
    ]
    text = tokenizer.apply_chat_template(chat, tools=[WEATHER], tokenize=False, add_generation_prompt=True)
    first, _, rest = text.partition("<|end|>")
    assert first.startswith('<|system|>Use the tools.\nTools:\n{"name": "get_weather", "description": ')
    assert rest == (
        "<|user|>What is the weather in Rome?<|end|>"
        '<|assistant|><tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call><|end|>'
        '<|tool|>{"sky": "sunny"}<|end|><|assistant|>'
    )


def test_arguments_may_be_text_as_clients_send_them(tokenizer: Any) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    written, sent = (
        render([{"role": "assistant", "content": None, "tool_calls": [call]}], [], begin_answer=False)
        for call in (CALL, {"type": "function", "function": function})
    )
    assert written == sent


def test_gateway_renders_a_chat_as_transformers_does(folder: Path, tokenizer: Any) -> None:
    chat = [system("Answer briefly."), user("Hello!"), assistant("Hello."), user("Who are you?")]
    expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert load_chat_template(str(folder)).render(chat) == expected


def test_answer_with_calls_is_read_as_a_message(tokenizer: Any) -> None:
    other = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    message = {"role": "assistant", "content": "", "tool_calls": [CALL, other]}
    prompt = render([user("Rome, Oslo?")], [WEATHER], begin_answer=True)
    answer = render([message], [], begin_answer=False).removeprefix("<|assistant|>")
    read = tokenizer.parse_response(tokenizer(answer).input_ids, prefix=prompt)
    assert read == {"role": "assistant", "tool_calls": [CALL, other]}
    assert tokenizer.parse_response("Hello.<|end|>", prefix=prompt) == {
        "role": "assistant",
        "content": "Hello.",
    }


def test_tags_stay_in_a_text_without_special_tokens(tokenizer: Any) -> None:
    text = '<tool_call>{"name": "add"}</tool_call>'
    assert tokenizer.decode(tokenizer(f"{text}<|end|>").input_ids, skip_special_tokens=True) == text
