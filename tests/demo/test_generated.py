"""Generated documents: reproducible, well formed, and true."""

import json
import re
from random import Random

import pytest

from outrider.demo.generated import GENERATORS


def texts(kind: str, count: int) -> list[str]:
    random = Random(3)
    return ["".join(GENERATORS[kind](random)) for _ in range(count)]


@pytest.mark.parametrize("kind", GENERATORS)
def test_the_same_seed_gives_the_same_documents(kind: str) -> None:
    assert texts(kind, 20) == texts(kind, 20)
    assert len(set(texts(kind, 20))) > 10


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_prompt_does_not_end_in_a_space(kind: str) -> None:
    random = Random(3)
    for _ in range(200):
        document = GENERATORS[kind](random)
        assert document.prompt == document.prompt.rstrip()
        assert document.continuation


def test_json_documents_parse() -> None:
    types = {json.loads(text)["type"] for text in texts("json", 200)}
    assert types == {"person", "order", "measurement", "service"}


def test_chats_alternate_and_close_every_turn() -> None:
    turn = r"<\|user\|>[^<|]+<\|end\|><\|assistant\|>[^<|]+<\|end\|>"
    for text in texts("question_answer", 200):
        assert re.fullmatch(f"({turn}){{1,3}}", text), text


def test_equations_are_true() -> None:
    checked = 0
    for text in texts("arithmetic", 200):
        for left, operator, right, result in re.findall(r"(\d+) ([+x-]) (\d+) = (\d+)", text):
            signed = {"+": int(right), "-": -int(right)}
            expected = int(left) * int(right) if operator == "x" else int(left) + signed[operator]
            assert expected == int(result), text
            checked += 1
    assert checked > 500
