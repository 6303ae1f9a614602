"""Calls that go back into a chat: ids, arguments and thoughts as each family's template takes them."""

import pytest

from gateway.api.openai.chat_template import ChatTemplate
from gateway.api.openai.messages import Message
from gateway.api.openai.rendering import ChatPrompts

ARGUMENTS = '{"city":  "Rome"}'  # two spaces: a text that is written anew has one
# Templates made for these tests; each takes arguments as a family's published template does.
CALLS = """\
{%- for message in messages -%}
    {{- '<' + message.role + '>' + (message.content or '') -}}
    {%- for call in message.tool_calls or [] -%}
        {{- call.id + ' ' + call.function.name + ' ' -}}ARGUMENTS
    {%- endfor -%}
    {{- message.tool_call_id or '' -}}
{%- endfor -%}
"""
TEXT = "{{ '' + call.function.arguments }}"
TEXT_OR_OBJECT = """\
{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"""
OBJECT = "{% for key, value in call.function.arguments.items() %}{{ key + '=' + value }}{% endfor %}"
OBJECT_AS_JSON = "{{ call.function.arguments | tojson }}"
BRACES = """\
{{ '{' }}{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}
{%- for key, value in call.function.arguments.items() %}{{ key + ':' + value }}{% endfor %}
{%- endif %}{{ '}' }}"""


def prompts(source):
    return ChatPrompts(ChatTemplate(source, {}), [], {})


def called(*ids, **more):
    calls = [{"id": each, "function": {"name": "weather", "arguments": ARGUMENTS}} for each in ids]
    results = [{"role": "tool", "tool_call_id": each, "content": "sunny"} for each in ids]
    asked, turn = {"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls, **more}
    return [Message.model_validate(message) for message in (asked, turn, *results)]


async def text_of(source, messages):
    return "".join((await prompts(source).rendered(messages)).pieces)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (TEXT, ARGUMENTS),
        (TEXT_OR_OBJECT, ARGUMENTS),
        (OBJECT, "city=Rome"),
        (OBJECT_AS_JSON, '{"city": "Rome"}'),
        (BRACES, "{city:Rome}"),
    ],
    ids=["text", "text or object", "object", "object as JSON", "object in braces"],
)
async def test_arguments_are_given_as_the_template_takes_them(written, expected):
    text = await text_of(CALLS.replace("ARGUMENTS", written), called("a"))
    assert f"weather {expected}" in text


async def test_ids_of_nine_characters_are_kept_and_others_shortened_for_mistral():
    source = "[TOOL_CALLS]" + CALLS.replace("ARGUMENTS", TEXT_OR_OBJECT)
    text = await text_of(source, called("abcDEF123", "call_of_another_server"))
    assert text.count("abcDEF123") == 2
    assert "call_of_another_server" not in text
    short = text.split("sunny")[-1].removesuffix("<tool>")
    assert len(short) == 9
    assert text.count(short) == 2


async def test_ids_are_counted_over_the_conversation_for_kimi():
    source = "<|tool_calls_section_begin|>" + CALLS.replace("ARGUMENTS", TEXT_OR_OBJECT)
    messages = called("a", "b") + called("a")
    rendered = await prompts(source).rendered(messages)
    text = "".join(rendered.pieces)
    for number, times in enumerate((2, 2, 2)):
        assert text.count(f"functions.weather:{number}") == times
    assert text.endswith("functions.weather:2")
    assert rendered.calls == 3


THOUGHTS = "{% for message in messages %}<{{ message.role }}>{{ message.content }}NAME{% endfor %}"


@pytest.mark.parametrize("sent", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("read", ["reasoning", "reasoning_content", "thinking"])
async def test_thoughts_reach_the_template_under_the_name_that_it_reads(sent, read):
    source = THOUGHTS.replace("NAME", f"{{{{ message.{read} }}}}")
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", sent: "I thought"}]
    rendered = await prompts(source).rendered([Message.model_validate(message) for message in chat])
    assert "".join(rendered.pieces).count("I thought") == 1
    assert rendered.left_out == ()


async def test_thoughts_beside_words_and_calls_are_told_as_left_out_if_the_template_refuses_them():
    refuses = "{% if message.thinking and message.content %}{{ raise_exception('both') }}{% endif %}"
    source = CALLS.replace("ARGUMENTS", TEXT_OR_OBJECT).replace("{%- for call", f"{refuses}{{%- for call")
    rendered = await prompts(source).rendered(called("a", content="I look.", reasoning="hm"))
    assert "I look." in "".join(rendered.pieces)
    assert rendered.left_out == ("messages.1.reasoning_content",)
