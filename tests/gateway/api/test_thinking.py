"""Forms begin after the thoughts of a model, whose marks its template tells, under every drafter."""

import json

import httpx
import pytest
from tokenizers import AddedToken

from gateway.api import http_api
from gateway.api.openai.answer_format import of_chat_template, of_template
from gateway.api.openai.chat_template import ChatTemplate
from gateway.generation.form import Form, Thoughts, choice, json_schema
from outrider.decoding.grammar import compiled, token_table
from tests.fakes.tokenizers import byte_tokenizer
from tests.support.calls import read
from tests.support.service import ANYBODY, service_of
from workshop.demo.chat import CHAT_TEMPLATE, RESPONSE_TEMPLATE

TURN = "<|im_start|>assistant\n"
# Layout of tokens that Qwen 3 publishes, in a template made for this test.
THINKS = of_chat_template(f"{{% if thinks %}}<think>{{% endif %}}{TURN}")
TOKEN = Thoughts("<[257]>", "<[258]>")
TEXT = Thoughts('"<think>"', '"</think>"')
FORMS = {
    "json": (json_schema('{"const": {"a": 1}}', ""), '{"a": 1}'),
    "regex": (Form("regex", "[a-c]/[0-9]", ""), "b/7"),
    "choice": (choice(["yes", "no"], ""), "no"),
}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (TURN, TEXT),
        (f"{TURN}<think>\n", Thoughts(None, TEXT.close)),
        (f"{TURN}<think>\n\n</think>\n\n", None),
        (f"<|im_start|>user\n<think><|im_end|>\n{TURN}", TEXT),
    ],
    ids=["none yet", "begun", "ended", "of a user"],
)
def test_thoughts_before_depend_on_the_prompt(prompt, expected):
    assert THINKS.thoughts_before(prompt, {}) == expected


def test_marks_that_are_tokens_are_taken_by_their_ids():
    assert THINKS.thoughts_before(TURN, {"<think>": 257, "</think>": 258}) == TOKEN


def test_thoughts_before_without_marks_are_none():
    assert of_template(RESPONSE_TEMPLATE).thoughts_before("<|assistant|>", {}) is None


def test_thoughts_of_granite_stand_between_two_sentences():
    granite = of_chat_template("Write your thoughts after 'Here is my thought process:'")
    turn = '<|start_of_role|>assistant {"thinking": true}<|end_of_role|>'
    text = "Here is my thought process:\nHm.\n\nHere is my response:\n\nIt rains."
    message, _ = read(granite, turn, text, 3)
    assert (message["reasoning_content"].strip(), message["content"]) == ("Hm.", "It rains.")
    assert granite.thoughts_before(turn, {}) == Thoughts(
        '"Here is my thought process:"', '"Here is my response:"'
    )
    message, _ = read(granite, turn, "It rains.", 3)
    assert message == {"role": "assistant", "refusal": None, "content": "It rains."}


@pytest.fixture(scope="module", params=["special", "not special"])
def tokens(request):
    """Returns the table of a tokenizer of bytes with the marks of thinking as added tokens."""
    tokenizer = byte_tokenizer()
    special = request.param == "special"
    tokenizer.add_tokens([AddedToken(mark, special=special) for mark in ("<think>", "</think>")])
    return token_table(tokenizer.to_str(), tokenizer.get_vocab_size(), [256])


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("marks", [TOKEN, TEXT], ids=["tokens", "text"])
def test_form_begins_after_the_thoughts(tokens, kind, marks):
    form, answer = FORMS[kind]
    opening, close = ([257], [258]) if marks is TOKEN else ([*b"<think>"], [*b"</think>"])
    thoughts, said = [*"hm {<é\n".encode()], [*answer.encode()]

    def follows(marks, text):
        """Returns whether the form accepts the text, and whether the answer may end there."""
        matcher = compiled(Form(form.kind, form.source, "", marks).grammar(), tokens)
        return matcher.try_consume_tokens(text) == len(text), matcher.is_accepting()

    assert follows(marks, opening + thoughts + close + said) == (True, True)
    assert follows(marks, said) == (True, True)
    assert follows(marks, opening + thoughts) == (True, False)
    assert follows(marks, thoughts)[0] is False
    assert follows(marks, opening + close + opening)[0] is False
    started = Thoughts(None, marks.close)
    assert follows(started, thoughts + close + said) == (True, True)
    assert follows(started, said) == (True, False)


@pytest.mark.parametrize("call", [False, True], ids=["response_format", "tool_choice"])
async def test_thoughts_are_free_and_answers_are_not_with_and_without_drafts(call):
    """Thoughts of the demo target are a sentence, from its first word to its full stop."""
    fields = {**RESPONSE_TEMPLATE["fields"], "reasoning_content": {"open": "The", "close": "."}}
    known = {**RESPONSE_TEMPLATE, "fields": fields}
    begins = "{% if add_generation_prompt %}The{% endif %}"
    template = ChatTemplate(CHAT_TEMPLATE + begins, {}, response_template=known)
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99, "minimum": 0}}}
    schema |= {"required": ["age"], "additionalProperties": False}
    ask = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 120}
    if call:
        ask["tools"] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        ask |= {"tool_choice": "required", "parallel_tool_calls": False}
    else:
        form = {"name": "a", "schema": schema}
        ask["response_format"] = {"type": "json_schema", "json_schema": form}
    async with service_of() as service:
        app = http_api.build(service.generation, template, ANYBODY)
        told = []
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            for mode in ("fixed", "off"):
                body = {**ask, "temperature": 0, "speculation": {"mode": mode}}
                choice = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
                message = choice["message"]
                calls = message.get("tool_calls", ())
                said = calls[0]["function"]["arguments"] if call else message["content"]
                told.append((choice["finish_reason"], message["reasoning_content"], said))
    assert told[0] == told[1]
    finish, thoughts, said = told[0]
    assert finish == ("tool_calls" if call else "stop")
    assert "Paris" in thoughts
    assert json.loads(said)["age"] in range(100)
