"""Gemma 4's assistant: its Drafts against those of transformers, its target's cache, refusals."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

from outrider.decoding.settings import Sampling
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from tests.support.assistant import PROMPTS, Pair, pair
from tests.support.heads import refusal_of
from tests.support.target_drafters import Drafted, drafters_with, engine_with, rounds

refusal = partial(refusal_of, "assistant")
DEPTH, TOKENS = 4, 20
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def engine_of(made: Pair, folder: Path, **settings: Any) -> Engine:
    target, assistant = made.write(folder)
    return engine_with("assistant", assistant, model=str(target), self_check=False, **settings)


def drafted(engine: Engine, temperature: float, depth: int = DEPTH, alternatives: int = 0) -> list[Drafted]:
    return rounds(engine, PROMPTS, temperature, depth, alternatives, max_tokens=TOKENS)


def check_drafts(made: Pair, found: list[Drafted], temperature: float) -> None:
    """Each Draft is what transformers drafts after the tokens that were committed then."""
    assert max(text.deepest for text in found) == DEPTH
    sampling = Sampling(temperature=temperature)
    for prompt, text in zip(PROMPTS, found, strict=True):
        whole = [*prompt, *text.tokens]
        for length, draft in zip(text.lengths, text.drafts, strict=True):
            expected = made.chain(whole[:length], len(draft), sampling, len(prompt))
            assert list(draft.tokens) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafts_are_those_of_transformers_after_refused_and_accepted_guesses(
    tmp_path: Path, temperature: float
) -> None:
    engine = engine_of(pair(), tmp_path)
    found, plain = drafted(engine, temperature), drafted(engine, temperature, depth=0)
    assert [text.tokens for text in found] == [text.tokens for text in plain]
    assert any(0 < text.accepted < DEPTH * text.rounds for text in found)
    check_drafts(pair(), found, temperature)


def test_assistant_with_clusters_of_tokens_drafts_what_transformers_does(tmp_path: Path) -> None:
    found = drafted(engine_of(pair(is_ordered=True), tmp_path), 0.7)
    check_drafts(pair(is_ordered=True), found, 0.7)


def test_assistant_reads_the_keys_that_layers_of_the_target_share(tmp_path: Path) -> None:
    found = drafted(engine_of(pair(shared=2), tmp_path), 0.7)
    check_drafts(pair(shared=2), found, 0.7)


def test_assistant_drafts_for_the_text_part_of_a_checkpoint_with_images(tmp_path: Path) -> None:
    made = pair()
    _, assistant = made.write(tmp_path)
    text = {**made.target.config.to_dict(), "architectures": None}  # published parts have none of their own
    whole = Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=VISION))
    whole.model.language_model.load_state_dict(made.target.model.state_dict())
    whole.save_pretrained(tmp_path / "whole")
    found = drafted(engine_with("assistant", assistant, model=str(tmp_path / "whole"), self_check=False), 0.7)
    check_drafts(made, found, 0.7)


def test_tree_brings_more_correct_guesses_and_the_same_text(tmp_path: Path) -> None:
    engine = engine_of(pair(), tmp_path)
    chains, trees = (drafted(engine, 0.7, alternatives=alternatives) for alternatives in (0, 6))
    assert [text.tokens for text in trees] == [text.tokens for text in chains]
    assert sum(text.accepted for text in trees) > sum(text.accepted for text in chains)
    assert any(not draft.is_chain for text in trees for draft in text.drafts)


def test_chunked_prompts_and_shared_prefixes_change_no_draft(tmp_path: Path) -> None:
    engine = engine_of(pair(), tmp_path, prefill_chunk=7, block_size=4)
    drafted(engine, 0.7)
    check_drafts(pair(), drafted(engine, 0.7), 0.7)  # most of each prompt was there


def changed(folder: Path, **config: Any) -> Path:
    _, assistant = pair().write(folder)
    told = json.loads((assistant / "config.json").read_text())
    (assistant / "config.json").write_text(json.dumps({**told, **config}))
    return assistant


def refusal_for_gemma(assistant: Path, **settings: Any) -> str:
    named = {"model": str(assistant.with_name("target")), **drafters_with("assistant", assistant), **settings}
    with pytest.raises(UnsupportedModelError) as refused:
        Engine.from_settings(EngineSettings.model_validate({**named, "cache_memory": 2**22}))
    return str(refused.value)


def test_assistant_that_does_not_suit_its_target_is_refused_by_what_differs(tmp_path: Path) -> None:
    assert "backbone_hidden_size=99 must be 64, the target's" in refusal_for_gemma(
        changed(tmp_path / "size", backbone_hidden_size=99)
    )
    assert "of kind 'gemma4_unified_assistant' and must be 'gemma4_assistant'" in refusal_for_gemma(
        changed(tmp_path / "kind", model_type="gemma4_unified_assistant")
    )
    assert "tensor_parallel=2 must be 1" in refusal_for_gemma(changed(tmp_path / "ranks"), tensor_parallel=2)
    assert "and the target is a LlamaForCausalLM" in refusal(changed(tmp_path / "target"))


def test_assistant_that_lacks_a_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    assistant = changed(tmp_path)
    tensors = load_file(assistant / "model.safetensors")
    del tensors["post_projection.weight"]
    save_file(tensors, assistant / "model.safetensors")
    assert "it has no post_projection.weight" in refusal_for_gemma(assistant)
    tensors["post_projection.weight"] = torch.zeros(64, 31)
    save_file(tensors, assistant / "model.safetensors")
    assert "post_projection.weight is [64, 31] and must be [64, 32]" in refusal_for_gemma(assistant)
