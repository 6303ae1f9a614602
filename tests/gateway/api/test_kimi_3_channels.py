"""Channels of Kimi K3: thoughts, words and calls, of which the prompt begins the first."""

import pytest

from gateway.api.openai.answer_format import of_chat_template
from gateway.api.openai.calls.grammar import CallGrammar
from gateway.api.openai.chat_template import ChatTemplate
from gateway.api.openai.messages import Message
from gateway.api.openai.rendering import ChatPrompts
from gateway.generation.form import json_schema
from tests.support.calls import FAMILIES, TOLD, TOOLS, Tokens, calls_of, read

SOURCE, _, CALLS, MARKS = FAMILIES["kimi k3"]
TURN = '<|open|>message role="assistant"<|sep|>'
THINKS, SPEAKS = f"{TURN}<|open|>think<|sep|>", f"{TURN}<|open|>response<|sep|>"
THOUGHT = "Hm, {x}.<|close|>think<|sep|><|open|>response<|sep|>"
END = "<|close|>response<|sep|><|close|>message<|sep|>"
# Template made for this test, on the layout of tokens that the family publishes.
TEMPLATE = """\
{%- for message in messages -%}
<|open|>message role="{{ message.role }}"<|sep|>
{%- if message.role == 'assistant' -%}
<|open|>response<|sep|>{{ message.content }}<|close|>response<|sep|>
{%- else -%}
{{ message.content }}
{%- endif -%}
<|close|>message<|sep|><|end_of_msg|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|open|>message role="assistant"<|sep|><|open|>{{ 'think' if thinking else 'response' }}<|sep|>
{%- endif -%}
"""


def call_with(key, value):
    """Returns a call of the tool weather with one argument, a text, as a model writes it."""
    begins, ends = CALLS[: CALLS.index("<|open|>argument")], "<|close|>call<|sep|><|close|>tools<|sep|>"
    argument = f'<|open|>argument key="{key}" type="string"<|sep|>{value}<|close|>argument<|sep|>'
    return f"{begins}{argument}{ends}<|close|>message<|sep|>"


@pytest.fixture(scope="module")
def kimi():
    return of_chat_template(SOURCE), Tokens(MARKS)


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_kimi_thoughts_words_and_calls_are_told_apart(kimi, size):
    answers, _ = kimi
    message, _ = read(answers, THINKS, f"{THOUGHT}I look.{CALLS}", size)
    assert (message["reasoning_content"], message["content"]) == ("Hm, {x}.", "I look.")
    assert calls_of(message) == TOLD


@pytest.mark.parametrize("ends", ["", END])
def test_kimi_answer_without_thoughts_is_the_text_of_its_channel(kimi, ends):
    answers, _ = kimi
    message, _ = read(answers, SPEAKS, f"It rains.{ends}", 3)
    assert message == {"role": "assistant", "refusal": None, "content": "It rains."}


def test_kimi_forms_begin_in_the_channel_of_words(kimi):
    answers, tokens = kimi
    form = json_schema('{"const": {"a": 1}}', "")
    thinking, speaking = [answers.held(form, start, tokens.added) for start in (THINKS, SPEAKS)]
    assert tokens.follows(thinking, f'{THOUGHT}{{"a": 1}}') == (True, True)
    assert tokens.follows(thinking, '{"a": 1}') == (True, False)  # these are thoughts
    assert tokens.follows(speaking, '{"a": 1}') == (True, True)
    assert tokens.follows(speaking, THOUGHT)[0] is False


def test_kimi_forced_calls_follow_thoughts_and_no_words(kimi):
    answers, tokens = kimi
    forced = CallGrammar(answers.calls, tokens.added, "tool_choice").only_calls(TOOLS, several=True)
    held = answers.held(forced, THINKS, tokens.added, is_text=False)
    assert tokens.follows(held, THOUGHT + CALLS) == (True, True)
    assert tokens.follows(held, f"{THOUGHT}So.")[0] is False


def test_kimi_strict_tools_let_an_answer_end_without_calls(kimi):
    answers, tokens = kimi
    strict = CallGrammar(answers.calls, tokens.added, "tools").valid_calls(TOOLS)
    assert tokens.follows(strict, f"It rains.{END}") == (True, True)


@pytest.mark.parametrize(
    ("key", "kind", "value", "fits"),
    [
        ("days", "number", "3", True),
        ("days", "string", "3", False),
        ("days", "array", "3", False),
        ("tags", "array", "[]", True),
    ],
)
def test_kimi_strict_arguments_have_the_types_of_their_schema(kimi, key, kind, value, fits):
    answers, tokens = kimi
    only = {**TOOLS[0]["function"]["parameters"], "required": [key]}
    tool = {"function": {"name": "weather", "parameters": only}}
    forced = CallGrammar(answers.calls, tokens.added, "tools").only_calls([tool], several=False)
    argument = f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
    begins, ends = CALLS[: CALLS.index("<|open|>argument")], "<|close|>call<|sep|><|close|>tools<|sep|>"
    assert tokens.follows(forced, f"{begins}{argument}{ends}")[0] is fits


@pytest.mark.parametrize("size", [1, 1000])
def test_kimi_keys_are_read_as_the_schema_has_them(kimi, size):
    answers, _ = kimi
    message, _ = read(answers, SPEAKS, call_with("R&amp;D &quot;x&quot; &amp;amp;", "1"), size)
    assert calls_of(message) == [("weather", {'R&D "x" &amp;': "1"})]


def test_kimi_strict_keys_are_written_as_the_template_writes_them(kimi):
    answers, tokens = kimi
    odd = {"type": "object", "properties": {'R&D "x"': {"type": "string"}}, "required": ['R&D "x"']}
    tool = {"function": {"name": "weather", "parameters": odd}}
    forced = CallGrammar(answers.calls, tokens.added, "tools").only_calls([tool], several=False)
    assert tokens.follows(forced, call_with("R&amp;D &quot;x&quot;", "1")) == (True, True)
    assert tokens.follows(forced, call_with('R&D "x"', "1"))[0] is False


async def test_kimi_turn_ends_at_its_own_token_and_not_where_a_channel_does():
    special = {token: number for number, token in enumerate([*MARKS, "<|end_of_msg|>"])}
    prompts = ChatPrompts(ChatTemplate(TEMPLATE, {}), [*special], special)
    assert prompts.ends == {special["<|end_of_msg|>"]}


async def test_kimi_answer_that_continues_a_text_is_read_as_text():
    prompts = ChatPrompts(ChatTemplate(TEMPLATE, {}), MARKS, {})
    chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "The sky"}]
    messages = [Message.model_validate(message) for message in chat]
    rendered = await prompts.rendered(messages, continues=True)
    assert "".join(rendered.pieces).endswith(f"{SPEAKS}The sky")
    message, _ = read(prompts.template.answers, rendered.answer_start, f" is blue.{END}")
    assert message["content"] == " is blue."
