"""Chat templates give the text that transformers gives, and fail with InvalidRequestError alone."""

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
def test_chat_template_text_equals_that_of_transformers(tmp_path, template, place):
    from transformers import AutoTokenizer

    if place == "chat_template.jinja":
        write_tokenizer(tmp_path, chat_template="the other place comes first")
        (tmp_path / place).write_text(template)
    else:
        write_tokenizer(tmp_path, chat_template=template)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    expected = reference.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert load_chat_template(str(tmp_path)).render(TURNS) == expected


def test_chat_template_default_of_several_is_taken(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    write_tokenizer(tmp_path, chat_template=named)
    assert load_chat_template(str(tmp_path)).render(TURNS) == "default"


def test_chat_template_missing_is_refused_by_name(tmp_path):
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
def test_chat_template_failure_refuses_the_request(template, message):
    with pytest.raises(InvalidRequestError, match=message) as refused:
        ChatTemplate(template, {}).render(TURNS)
    assert refused.value.field == "messages"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{ tools | tojson }}", '[{"type": "function", "function": {"name": "now"}}]'),
        ("{{ tools[0].function.name + tools[0].function.description }}", "now"),
    ],
    ids=["as it is sent", "empty where the template needs it"],
)
def test_tool_without_a_description_has_none_unless_the_template_needs_it(written, expected):
    tool = {"type": "function", "function": {"name": "now"}}
    assert ChatTemplate(f"{{% if tools %}}{written}{{% endif %}}", {}).render(TURNS, tools=[tool]) == expected


CHATS = {"plain": ((), "plain template"), "tools": (({"type": "function"},), "template for tools")}


@pytest.mark.parametrize("chat", CHATS)
def test_chat_template_tools_in_an_own_file_equals_that_of_transformers(tmp_path, chat):
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("plain template")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(
        "template for tools{{ tools and '' }}"
    )
    tools, expected = CHATS[chat]
    reference = AutoTokenizer.from_pretrained(tmp_path)
    told = reference.apply_chat_template(TURNS, tools=[*tools] or None, tokenize=False)
    template = load_chat_template(str(tmp_path))
    assert template.render(TURNS, tools=tools) == told == expected
    assert template.knows_tools


def test_special_tokens_come_from_the_older_file_too_as_in_transformers(tmp_path):
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, bos_token=None, eos_token="<|end|>")
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<|start|>"}, "eos_token": "<|other|>"})
    )
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}|{{ eos_token }}")
    text = load_chat_template(str(tmp_path)).render(TURNS)
    assert text.startswith("<|start|>|")
    assert text.endswith("|<|end|>")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    reference = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(TURNS, tokenize=False)
    assert load_chat_template(str(tmp_path)).render(TURNS) == reference == "<|start|>|<|other|>"


def test_chat_template_processor_s_is_read_if_the_tokenizer_has_none(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert load_chat_template(str(tmp_path)).render(TURNS) == "of the processor"


def test_chat_template_token_without_a_file_is_logged(caplog):
    with caplog.at_level("WARNING", logger="ray.serve"):
        ChatTemplate("{{ bos_token }}{{ eos_token }}", {"eos_token": "<|end|>"})
    assert [record.args for record in caplog.records] == [("bos_token",)]
