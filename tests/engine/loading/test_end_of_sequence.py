"""A generation ends at what any public file of the checkpoint calls its end."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.engine.loading.special_tokens import end_of_sequence
from tests.fakes.tokenizers import byte_tokenizer

END = {"id": 256, "content": "<|end|>"}  # end token of the tokenizer
CONFIGS: dict[str, tuple[dict[str, dict[str, Any]], Any, set[int]]] = {
    "generation_config alone": ({}, [3, 4], {3, 4}),
    "config too": ({"config.json": {"eos_token_id": 7}}, 3, {3, 7}),
    "the text's config": ({"config.json": {"text_config": {"eos_token_id": [7, 8]}}}, None, {7, 8}),
    "the tokenizer": ({"tokenizer_config.json": {"eos_token": "<|end|>"}}, 3, {3, 256}),
    "the tokenizer's older file": (
        {"special_tokens_map.json": {"eos_token": {"content": "<|end|>"}}},
        3,
        {3, 256},
    ),
    "ids in the tokenizer's config": (
        {"tokenizer_config.json": {"eos_token": "x", "added_tokens_decoder": {"9": {"content": "x"}}}},
        None,
        {9},
    ),
    "a token of the vocabulary": ({"tokenizer_config.json": {"eos_token": "A"}}, None, {65}),
    "one that the model does not have": ({"config.json": {"eos_token_id": 1000}}, 3, {3}),
    "none": ({}, None, {2}),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_every_file_that_names_an_end_counts(tmp_path: Any, case: str) -> None:
    files, of_generation, expected = CONFIGS[case]
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    for name, fields in files.items():
        (tmp_path / name).write_text(json.dumps(fields))
    config = SimpleNamespace(eos_token_id=2, vocab_size=300)  # 2: the architecture's own
    model = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=of_generation),
        config=SimpleNamespace(get_text_config=lambda: config),
    )
    assert end_of_sequence(model, str(tmp_path)) == expected
