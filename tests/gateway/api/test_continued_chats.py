"""Chats whose last message the answer continues."""

import pytest

from gateway.errors import InvalidRequestError
from tests.support.chats import CHATML, told

STRIPS = CHATML.replace("m.content", "(m.content | trim)")
THINKS = CHATML.replace("m.content", "m.content.split('</think>')[-1]")


@pytest.mark.parametrize(
    ("source", "text", "shown"),
    [
        (CHATML, "The sky is", "The sky is"),
        (CHATML, "The sky is ", "The sky is "),
        (STRIPS, "The sky is ", "The sky is"),
        (CHATML, "a|b<|end|>c", "a|b<|end|>c"),
        (THINKS, "<think>so</think>The sky", "The sky"),
    ],
    ids=["text", "trailing space", "a template that strips", "text like a mark", "thoughts left out"],
)
async def test_continued_chat_ends_with_the_text_of_its_last_message(source, text, shown):
    last = {"role": "assistant", "content": text}
    assert (
        await told(source, "Why?", last, continues=True)
        == f"<|turn|>user:Why?<|end|><|turn|>assistant:{shown}"
    )


async def test_continued_chat_after_an_equal_text_is_cut_at_the_last_one():
    same = {"role": "assistant", "content": "Yes"}
    text = await told(CHATML, "A?", same, "Yes", same, continues=True)
    assert text.endswith("<|turn|>user:Yes<|end|><|turn|>assistant:Yes")


KEEPS_FIRST = CHATML.replace("{% for m in messages %}", "{% for m in messages[:1] %}")


@pytest.mark.parametrize(
    ("source", "last"),
    [
        (CHATML, "Hi"),
        (CHATML, {"role": "assistant", "content": " "}),
        (
            CHATML,
            {
                "role": "assistant",
                "content": "x",
                "tool_calls": [{"id": "1", "function": {"name": "go", "arguments": "{}"}}],
            },
        ),
        (KEEPS_FIRST, {"role": "assistant", "content": "The sky is"}),
    ],
    ids=["of the user", "blank", "with a call", "left out"],
)
async def test_continued_chat_without_an_open_last_text_is_refused(source, last):
    with pytest.raises(InvalidRequestError) as refused:
        await told(source, "Why?", last, continues=True)
    assert refused.value.field == "continue_final_message"


async def test_chat_without_generation_prompt_ends_with_its_last_message():
    assert await told(CHATML, "Why?", begin_answer=False) == "<|turn|>user:Why?<|end|>"
