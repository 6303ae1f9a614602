"""MTP layers of targets that carry one: their Drafts against plain arithmetic, forms, traps, the cache."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.decoding.settings import Sampling
from outrider.engine.drafters.mtp import Mtp
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loop.engine import Engine
from tests.support.mtp import (
    HYBRID_KINDS,
    KINDS,
    LAYERS,
    PROMPTS,
    SETTINGS,
    SIZE,
    TRAPS,
    Reference,
    plain_texts,
    published,
    reference,
    write_target,
)
from tests.support.quantized_checkpoints import quantize
from tests.support.target_drafters import TOKENS, Drafted, drafter_of, engine_with, rounds

BLOCK = 4 * (LAYERS + 1) * 2 * 2 * 16 * 4  # bytes of four tokens, of glm4_moe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("glm4_moe"), "glm4_moe")


@pytest.fixture(scope="module")
def target(folder: Path) -> Engine:
    return target_in(folder)


def target_in(folder: Path, **settings: Any) -> Engine:
    return engine_with("mtp", **{**SETTINGS, "model": str(folder), **settings})


def differing(found: list[Drafted], expected: Reference, temperature: float) -> int:
    """Drafts that are not what plain arithmetic drafts after the tokens that were committed then."""
    sampling, count = Sampling(temperature=temperature), 0
    for prompt, text in zip(PROMPTS, found, strict=True):
        tokens = [*prompt, *text.tokens]
        hidden = expected.hidden(tokens)
        for length, draft in zip(text.lengths, text.drafts, strict=True):
            chain = expected.chain(hidden[: length - 1], tokens[:length], len(draft), sampling, len(prompt))
            count += list(draft.tokens) != chain
    return count


# The first is in all tests below, the others are much alike.
SLOW = ("glm4_moe", "glm4_moe_lite", "mellum", "qwen3_next")
EVERY_KIND = (*KINDS, *HYBRID_KINDS)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in EVERY_KIND]
)
def test_drafts_are_those_of_plain_arithmetic_after_partly_refused_chains_too(
    tmp_path: Path, kind: str
) -> None:
    found = rounds(target_in(write_target(tmp_path, kind)), PROMPTS, 0.7, 4)
    assert [text.tokens for text in found] == plain_texts(tmp_path, 0.7)
    assert differing(found, reference(kind), 0.7) == 0
    for prompt, text in zip(PROMPTS, found, strict=True):  # none ended before its depth, or the text's end
        end = len(prompt) + TOKENS
        assert [len(draft) for draft in text.drafts] == [min(4, end - at - 1) for at in text.lengths]
    assert any(0 < text.accepted < 4 * text.rounds for text in found)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("trap", sorted(TRAPS))
def test_layer_that_is_read_a_little_wrong_drafts_otherwise(target: Engine, trap: str) -> None:
    """It raises nothing: the comparison above must see it."""
    found = rounds(target, PROMPTS[:2], 0.0, 4)
    wrong = replace(reference("glm4_moe"), trap=trap)
    assert differing([*found, Drafted()], wrong, 0.0) > 0
    assert differing([*found, Drafted()], reference("glm4_moe"), 0.0) == 0


@pytest.mark.parametrize(
    "temperature", [0.7, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.0, 1.0))]
)
def test_text_is_the_same_with_drafts_and_without(folder: Path, target: Engine, temperature: float) -> None:
    expected = plain_texts(folder, temperature)
    together = rounds(target, PROMPTS, temperature, 4)
    alone = [text for prompt in PROMPTS for text in rounds(target, [prompt], temperature, 4)]
    for found in (together, alone):
        assert [text.tokens for text in found] == expected
        assert sum(text.accepted for text in found) > 0


def test_each_node_of_a_tree_follows_its_own_branch(folder: Path, target: Engine) -> None:
    expected, sampling = reference("glm4_moe"), Sampling(temperature=0.7)
    found = rounds(target, PROMPTS, 0.7, 4, alternatives=6)
    assert [text.tokens for text in found] == plain_texts(folder, 0.7)
    prompt, text = PROMPTS[1], found[1]
    tokens = [*prompt, *text.tokens]
    hidden, deepest = expected.hidden(tokens), 0
    for length, draft in zip(text.lengths, text.drafts, strict=True):
        for parent in {*draft.parents}:
            children = [node for node, above in enumerate(draft.parents) if above == parent]
            path = [draft.tokens[node] for node in draft.path(parent)]
            before = hidden[: length - 1], tokens[:length], path
            best = expected.best_after(*before, len(children), sampling, len(prompt))
            assert [draft.tokens[node] for node in children] == best
            if parent >= draft.chain_length:
                deepest = max(deepest, draft.depths[parent])
    assert deepest > 0  # below an alternative, where another branch's tokens must not be seen


def test_chunked_prompts_and_shared_prefixes_change_no_draft(folder: Path) -> None:
    chunked = target_in(folder, prefill_chunk=24)
    rounds(chunked, PROMPTS, 0.7, 4)
    assert differing(rounds(chunked, PROMPTS, 0.7, 4), reference("glm4_moe"), 0.7) == 0  # most was there


@pytest.mark.slow
def test_lost_caches_change_no_draft(folder: Path) -> None:
    tight = target_in(folder, cache_memory=30 * BLOCK)
    preempted = rounds(tight, PROMPTS, 0.7, 4)
    assert [text.tokens for text in preempted] == plain_texts(folder, 0.7)
    assert sum(text.preemptions for text in preempted) > 0
    assert differing(preempted, reference("glm4_moe"), 0.7) == 0  # some end early, for want of blocks


def test_plain_decoding_between_rounds_leaves_no_gap_in_the_layers_cache(target: Engine) -> None:
    found = rounds(target, PROMPTS[:1], 0.7, 4, plain=(8, 16))
    assert differing([*found, *[Drafted()] * 2], reference("glm4_moe"), 0.7) == 0
    assert found[0].lengths[-1] > len(PROMPTS[0]) + 16


@pytest.mark.parametrize("rule", ["rejection", pytest.param("block", marks=pytest.mark.slow)])
def test_under_rejection_or_block_drafts_say_what_they_were_drawn_from(target: Engine, rule: str) -> None:
    found = rounds(target, PROMPTS, 1.0, 4, verification=rule)
    assert sum(text.accepted for text in found) > 0
    assert all(len(draft.draft_probs) == len(draft) for text in found for draft in text.drafts)


def test_in_bfloat16_experts_are_chosen_by_the_numbers_as_they_are_stored(folder: Path) -> None:
    """Experts are chosen as in the target: bfloat16 would choose other experts if two are close."""
    target = target_in(folder, dtype="bfloat16")
    assert isinstance(drafter := drafter_of(target), Mtp)
    bias = "mlp.gate.e_score_correction_bias"
    stored = published("glm4_moe")[f"model.layers.{LAYERS}.{bias}"]
    assert torch.equal(drafter._model.layers[0].mtp_block.state_dict()[bias], stored)
    assert sum(text.accepted for text in rounds(target, PROMPTS, 0.7, 4)) > 0


def test_layers_after_the_first_are_left_out(tmp_path: Path) -> None:
    layer = published("qwen3")
    second = {
        name.replace("layers.0", "layers.1"): torch.zeros_like(tensor)
        for name, tensor in layer.items()
        if "layers.0" in name
    }
    found = rounds(target_in(write_target(tmp_path, "qwen3", {**layer, **second})), PROMPTS, 0.0, 4)
    assert differing(found, reference("qwen3"), 0.0) == 0


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen3", "fp8"),
        pytest.param("qwen3", "compressed fp8", marks=pytest.mark.slow),
        pytest.param("qwen3", "compressed int4", marks=pytest.mark.slow),
        pytest.param("glm4_moe", "fp8", marks=pytest.mark.slow),
    ],
)
def test_quantized_layer_drafts_what_its_weights_stand_for(tmp_path: Path, kind: str, name: str) -> None:
    quantized, meant = quantize(write_target(tmp_path, kind), name, tmp_path / "in")
    found, expected = (rounds(target_in(folder), PROMPTS, 0.7, 4) for folder in (quantized, meant))
    assert found == expected
    assert sum(text.accepted for text in found) > 0


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        target_in(folder, **settings)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_target_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    assert "has no MTP layer: no tensor is named model.layers.3.* or mtp.*" in refusal(
        write_target(tmp_path, "qwen3", {"lm_head.bias": torch.zeros(1)})
    )


def test_layer_that_cannot_be_served_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "drafters.mtp.checkpoint='eagle' for model=" in refusal(folder, checkpoint=Path("eagle"))


def test_target_in_fp8_with_a_layer_that_it_cannot_read_is_refused_by_the_weights_name(
    tmp_path: Path,
) -> None:
    layer, name = published("qwen3"), "mtp.layers.0.mlp.up_proj.weight"
    kept = {other: tensor for other, tensor in layer.items() if other != name}
    packed = {**kept, "mtp.layers.0.mlp.up_proj.qweight": torch.zeros(2, 2, dtype=torch.int32)}
    (tmp_path / "packed").mkdir()
    said = refusal(write_target(tmp_path / "packed", "qwen3", packed))
    assert "its MTP layer has no" in said
    assert "mlp.up_proj.weight" in said

    (tmp_path / "whole").mkdir()
    in_fp8, _ = quantize(write_target(tmp_path / "whole", "qwen3"), "fp8", tmp_path / "in")
    (file,) = (file for file in in_fp8.glob("*.safetensors") if name in load_file(file))
    stored = load_file(file)
    scale = next(other for other in stored if other.startswith(f"{name}_scale"))
    save_file({**stored, scale: torch.ones(3, 1)}, file, {"format": "pt"})
    owner = name.removesuffix(".weight")
    assert f"{owner} cannot be read: its scales are [3, 1] and must be [" in refusal(in_fp8)
    del stored[scale]
    save_file(stored, file, {"format": "pt"})
    assert f"{owner} cannot be read: it has no weight_scale" in refusal(in_fp8)


def test_layer_that_lacks_something_is_refused_by_its_name(tmp_path: Path) -> None:
    layer = published("glm4_moe")
    start = f"model.layers.{LAYERS}."

    def said(name: str, tensors: dict[str, Any]) -> str:
        (tmp_path / name).mkdir()
        return refusal(write_target(tmp_path / name, "glm4_moe", tensors))

    def without(name: str) -> dict[str, Any]:
        return {other: tensor for other, tensor in layer.items() if other != start + name}

    assert "its MTP layer has no layers.0.eh_proj.weight" in said("missing", without("eh_proj.weight"))
    assert "mlp.experts.down_proj" in said("expert", without("mlp.experts.2.down_proj.weight"))
    wide = {**layer, start + "eh_proj.weight": torch.zeros(SIZE, 3 * SIZE)}
    assert f"layers.0.eh_proj.weight is [{SIZE}, {3 * SIZE}] and must be [{SIZE}, {2 * SIZE}]" in said(
        "shape", wide
    )
    more = {**layer, start + "self_attn.gate.weight": torch.zeros(2, 2)}
    assert "self_attn.gate.weight is no part of an MTP layer" in said("unknown", more)


def test_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    write_target(tmp_path, "qwen3")
    file = (
        tmp_path
        / json.loads((tmp_path / "model.safetensors.index.json").read_bytes())["weight_map"]["mtp.fc.weight"]
    )
    file.write_bytes(file.read_bytes()[:100])
    assert f"{file.name} cannot be read as tensors" in refusal(tmp_path)
