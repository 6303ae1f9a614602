"""Chat templates give the text that transformers gives, and can fail in no way but one."""

import json

import pytest

from gateway.api.openai.chat_template import ChatTemplate, load_chat_template
from gateway.errors import InvalidRequestError
from tests.fakes.tokenizers import byte_tokenizer

TURNS = [
    {"role": "system", "content": " Be brief.\n"},
    {"role": "user", "content": "<b>ä & 'ö'</b>"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "{{ 1 + 1 }}"},
]
TEMPLATES = {
    "blocks on lines of their own": (
        "{{ bos_token }}\n"
        "{% for message in messages %}\n"
        "    {% if message['role'] == 'system' %}\n"
        "System: {{ message['content'] | trim }}\n"
        "    {% else %}\n"
        "{{ message.role }}: {{ message.content }}{{ eos_token }}\n"
        "    {% endif %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    ),
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "a date": "{{ strftime_now('%Y') }}",
    "loops that break off": (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
    ),
    "names": (
        "{% set space = namespace(last='') %}"
        "{% for m in messages %}{% set space.last = m.content %}{% endfor %}{{ space.last }}"
        "{% if tools is none and documents is none %}no tools{% endif %}"
    ),
    "marks for training": (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    ),
}


def write_tokenizer(folder, **config):
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>", "__type": "AddedToken"}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, "pad_token": None, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_the_text_is_that_of_transformers(tmp_path, template, place):
    from transformers import AutoTokenizer

    if place == "chat_template.jinja":
        write_tokenizer(tmp_path, chat_template="the other place comes first")
        (tmp_path / place).write_text(template)
    else:
        write_tokenizer(tmp_path, chat_template=template)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert load_chat_template(str(tmp_path)).render(TURNS) == expected


def test_of_several_templates_the_default_is_taken(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    write_tokenizer(tmp_path, chat_template=named)
    assert load_chat_template(str(tmp_path)).render(TURNS) == "default"


def test_a_tokenizer_without_a_template_refuses_by_name(tmp_path):
    write_tokenizer(tmp_path)
    with pytest.raises(InvalidRequestError, match="no chat template") as refused:
        load_chat_template(str(tmp_path)).render(TURNS)
    assert refused.value.field == "messages"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('begin with a user') }}", "begin with a user"),
        ("{{ messages[0].nothing.more }}", "no attribute"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_whatever_a_template_does_is_the_request_refused(template, message):
    with pytest.raises(InvalidRequestError, match=message) as refused:
        ChatTemplate(template, {}).render(TURNS)
    assert refused.value.field == "messages"
