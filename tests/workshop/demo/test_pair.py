"""The shipped pair: loads everywhere, is small, writes every kind of text, agrees as its card says."""

import json
import re
from functools import cache
from random import Random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.demo.prompts import DEMO, prompts
from workshop.demo.acceptance import measure, written_texts
from workshop.demo.generated import GENERATORS
from workshop.demo.pair import load_model, load_tokenizer
from workshop.demo.tokenizer import END, END_OF_TEXT

# well under the model card's figures and far over what an unrelated draft reaches
MIN_ACCEPTANCE = {
    "code": 0.5,
    "prose": 0.5,
    "json": 0.8,
    "question_answer": 0.75,
    "conversations": 0.75,
    "tool_calls": 0.7,
    "schema_answers": 0.6,
}


@cache
def pair() -> tuple[Any, Any]:
    return load_model(DEMO / "target"), load_model(DEMO / "draft")


def prompt_tokens(kind: str, count: int) -> list[list[int]]:
    tokenizer = load_tokenizer(DEMO / "target")
    return [tokenizer.encode(prompt).ids for prompt in prompts(kind, count)]


@pytest.mark.parametrize(("role", "parameters"), [("target", 4_066_560), ("draft", 459_136)])
def test_pair_is_a_standard_checkpoint(role: str, parameters: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO / role)
    assert model.num_parameters() == parameters
    assert model.dtype == torch.bfloat16
    assert model.config.max_position_embeddings == 2048
    assert model.config.eos_token_id == [END_OF_TEXT, END]


def test_pair_shares_one_tokenizer() -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (DEMO / "target" / file).read_bytes() == (DEMO / "draft" / file).read_bytes()


def test_tokenizer_loads_with_transformers_and_without() -> None:
    full = AutoTokenizer.from_pretrained(DEMO / "target")
    chat = [{"role": "user", "content": "What is two plus 12?"}]
    text = full.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>What is two plus 12?<|end|><|assistant|>"
    plain = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    assert full(text).input_ids == plain.encode(text).ids
    assert (full.eos_token_id, len(full)) == (END_OF_TEXT, 2048)


def test_files_take_at_most_ten_megabytes() -> None:
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) <= 10_000_000


OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in MIN_ACCEPTANCE if kind != "json"]


@cache
def greedy_texts(kind: str) -> list[list[int]]:
    return written_texts(pair()[0], prompt_tokens(kind, 8), 300, temperature=0.0)


@pytest.mark.parametrize("kind", ["json", *OTHERS])
def test_draft_agrees_with_the_target(kind: str) -> None:
    found = measure(pair(), prompt_tokens(kind, 8), temperature=1.0, count=64)
    assert found.overlap >= MIN_ACCEPTANCE[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["json", "tool_calls"])
def test_greedy_text_comes_to_its_end(kind: str) -> None:
    assert sum(text[-1] in (END_OF_TEXT, END) for text in greedy_texts(kind)) >= 6


def test_greedy_json_parses() -> None:
    tokenizer = load_tokenizer(DEMO / "target")
    parsed = 0
    for prompt, text in zip(prompt_tokens("json", 8), greedy_texts("json"), strict=True):
        try:
            json.loads(tokenizer.decode(prompt + text))
            parsed += 1
        except json.JSONDecodeError:
            continue
    assert parsed >= 6


def greedy_answers(kind: str) -> list[tuple[str, str]]:
    """Prompts, and what the target says to them."""
    tokenizer = load_tokenizer(DEMO / "target")
    answers = [tokenizer.decode(text) for text in greedy_texts(kind)]
    return list(zip(prompts(kind, 8), answers, strict=True))


@pytest.mark.slow
def test_greedy_tool_calls_suit_the_tools_at_hand() -> None:
    called = suits = 0
    for prompt, answer in greedy_answers("tool_calls"):
        listed = prompt.partition("Tools:\n")[2].partition("<|end|>")[0]
        tools = {tool["name"]: tool["parameters"] for tool in map(json.loads, listed.splitlines())}
        calls = re.findall(r"<tool_call>(.*?)</tool_call>", answer)
        called += bool(calls)
        try:
            for call in map(json.loads, calls):
                jsonschema.validate(call["arguments"], tools[call["name"]])
        except (json.JSONDecodeError, jsonschema.ValidationError, KeyError):
            continue
        suits += bool(calls)
    assert called >= 4  # the other prompts go on after a result, or need no tool
    assert suits >= called - 1


@pytest.mark.slow
def test_greedy_answers_are_json_and_half_of_them_suit_their_schema() -> None:
    """A model of this size forgets properties of longer schemas."""
    parsed = suits = 0
    for prompt, answer in greedy_answers("schema_answers"):
        schema = re.search(r"of this schema: (\{.*?\})<\|end\|>", prompt)
        try:
            value = json.loads(answer)
            parsed += 1
            jsonschema.validate(value, json.loads(schema[1]) if schema else {})
            suits += 1
        except (json.JSONDecodeError, jsonschema.ValidationError):
            continue
    assert parsed >= 7
    assert suits >= 4


@torch.inference_mode()
def test_target_predicts_text_as_well_far_past_the_usual_length() -> None:
    random = Random("long text")
    stories = "<|endoftext|>".join("".join(GENERATORS["stories"](random)) for _ in range(40))
    tokens = torch.tensor([load_tokenizer(DEMO / "target").encode(stories).ids[:2048]])
    logits = pair()[0](input_ids=tokens).logits[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
    assert len(losses) == 2047
    assert losses[1024:].mean() < 1.3 * losses[128:512].mean()
