"""The pair's chat format: its template, how answers are parsed, and documents written in it.

Tool calls have the format of Hermes and Qwen: JSON in tags.
"""

from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from workshop.demo.document import Document

Message = dict[str, Any]

CHAT_TEMPLATE = """\
{%- set turns = messages -%}
{%- if tools -%}
    {{- '<|system|>' -}}
    {%- if turns[0].role == 'system' -%}
        {{- turns[0].content + '\\n' -}}
        {%- set turns = turns[1:] -%}
    {%- endif -%}
    {{- 'Tools:' -}}
    {%- for tool in tools -%}
        {{- '\\n' + tool.function | tojson -}}
    {%- endfor -%}
    {{- '<|end|>' -}}
{%- endif -%}
{%- for message in turns -%}
    {{- '<|' + message.role + '|>' + (message.content or '') -}}
    {%- for call in message.tool_calls or [] -%}
        {%- set arguments = call.function.arguments -%}
        {{- '<tool_call>{"name": ' + call.function.name | tojson + ', "arguments": ' -}}
        {{- arguments if arguments is string else arguments | tojson -}}
        {{- '}</tool_call>' -}}
    {%- endfor -%}
    {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""

# template by which `parse_response` of transformers parses an answer
RESPONSE_TEMPLATE: dict[str, Any] = {
    "version": 1,
    "start_anchor": "<|assistant|>",
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {"close": "<|end|>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
    },
}


def render(messages: list[Message], tools: list[dict[str, Any]], begin_answer: bool) -> str:
    """Returns a chat as text; `begin_answer` adds the start of the assistant's next turn."""
    rendered, _ = render_jinja_template(
        [messages], tools or None, chat_template=CHAT_TEMPLATE, add_generation_prompt=begin_answer
    )
    text: str = rendered[0]
    return text


def chat_document(messages: list[Message], answer: int, tools: list[dict[str, Any]]) -> Document:
    """Returns a chat. Its prompt ends where `messages[answer]`, a message of the assistant, starts."""
    prompt = render(messages[:answer], tools, begin_answer=True)
    return Document(prompt, render(messages, tools, begin_answer=False).removeprefix(prompt))


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def system(content: str) -> Message:
    return {"role": "system", "content": content}
