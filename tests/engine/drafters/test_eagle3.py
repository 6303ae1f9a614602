"""EAGLE-3 heads: their Drafts against plain arithmetic, formats, traps, the cache."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.loop.engine import Engine
from tests.support.eagle3 import Form, check_depths, check_drafts, write_eagle3
from tests.support.heads import refusal_of
from tests.support.target_drafters import check_no_gap, drafted_texts, engine_with, plain_texts

refusal = partial(refusal_of, "eagle3")

FORMS = {
    "plain": Form(),
    "reduced vocabulary": Form(tokens=300, norm_before_residual=True),
    "version 3.1": Form(norm_before_fc=True, norm_output=True),
    "five layers of the target": Form(layers=(0, 1, 2, 5, 6), fc_norm=True),
    "several layers": Form(draft_layers=3),
    "latents": Form(latent=32),
}
QUICK_FORMS = {"several layers", "latents"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return engine_with("eagle3", write_eagle3(tmp_path_factory.mktemp("heads") / "eagle3"))


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK_FORMS else pytest.mark.slow) for name in FORMS]
)
@torch.inference_mode()
def test_drafts_are_those_of_plain_arithmetic_after_partly_refused_chains_too(
    tmp_path: Path, name: str
) -> None:
    target = engine_with("eagle3", write_eagle3(tmp_path, FORMS[name]))
    found = drafted_texts(target, 0.7, depth=4, company=6)
    assert [text.tokens for text in found] == plain_texts(0.7)
    check_drafts(found, FORMS[name], 0.7)
    check_depths(found, 4)
    assert any(0 < text.accepted < 4 * text.rounds for text in found)


@pytest.mark.parametrize(
    ("temperature", "company"), [(0.0, 6), pytest.param(0.7, 1, marks=pytest.mark.slow), (1.0, 6)]
)
def test_text_is_the_same_with_drafts_and_without(target: Engine, temperature: float, company: int) -> None:
    found = drafted_texts(target, temperature, depth=4, company=company)
    assert [text.tokens for text in found] == plain_texts(temperature)
    assert sum(text.accepted for text in found) > 0


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("kind", ["safeailab", "modelopt"])
def test_other_forms_hold_the_same_head(tmp_path: Path, target: Engine, kind: str) -> None:
    """Their configs count layers by their outputs."""
    other = engine_with("eagle3", write_eagle3(tmp_path, kind=kind))
    expected, found = (drafted_texts(model, 0.7, depth=4, company=6) for model in (target, other))
    assert found == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]},
        pytest.param({"norm_before_residual": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_config_that_is_a_little_wrong_drafts_otherwise(
    tmp_path: Path, target: Engine, wrong: dict[str, Any]
) -> None:
    """Feature layers off by one and the wrong residual raise nothing: the comparison above must see them."""
    other = engine_with("eagle3", write_eagle3(tmp_path, **wrong))
    right, found = (drafted_texts(model, 0.0, depth=4, company=6) for model in (target, other))
    assert [text.tokens for text in found] == [text.tokens for text in right]
    assert [text.drafts for text in found] != [text.drafts for text in right]


@torch.inference_mode()
@pytest.mark.slow
def test_chunked_prompts_shared_prefixes_and_lost_caches_change_no_draft(tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path)
    target = engine_with("eagle3", folder, prefill_chunk=24, block_size=4)
    drafted_texts(target, 0.7, depth=4, company=6)
    check_drafts(drafted_texts(target, 0.7, depth=4, company=6), Form(), 0.7)  # most of each prompt was there
    block = 4 * (6 * 2 * 4 * 32 + 2 * 2 * 64) * 4
    tight = engine_with("eagle3", folder, block_size=4, cache_memory=60 * block)
    preempted = drafted_texts(tight, 0.7, depth=4, company=6)
    assert [text.tokens for text in preempted] == plain_texts(0.7)
    assert sum(text.preemptions for text in preempted) > 0
    check_drafts(preempted, Form(), 0.7)  # some end early, for want of blocks


def test_plain_decoding_between_rounds_leaves_no_gap_in_the_heads_cache(target: Engine) -> None:
    check_no_gap(target)


@pytest.mark.parametrize("rule", [pytest.param("rejection", marks=pytest.mark.slow), "block"])
def test_under_rejection_or_block_drafts_say_what_they_were_drawn_from(target: Engine, rule: str) -> None:
    found = drafted_texts(target, 1.0, depth=4, company=6, verification=rule)
    assert sum(text.accepted for text in found) > 0
    assert all(len(draft.draft_probs) == len(draft) for text in found for draft in text.drafts)


def test_head_of_another_target_is_refused_by_what_differs(tmp_path: Path) -> None:
    verifier = {"verifier": {"architectures": ["Qwen3ForCausalLM"]}}
    assert "made for a Qwen3ForCausalLM, and the target is a LlamaForCausalLM" in refusal(
        write_eagle3(tmp_path / "architecture", speculators_config=verifier)
    )
    assert "reads layer 60 of a target, and this one has 6" in refusal(
        write_eagle3(tmp_path / "layers", eagle_aux_hidden_state_layer_ids=[2, 3, 60])
    )
    assert "fc.weight is [256, 768] and must be [256, 512]" in refusal(
        write_eagle3(tmp_path / "features", eagle_aux_hidden_state_layer_ids=[2, 3])
    )
    assert "vocab_size=999 must be 2048" in refusal(
        write_eagle3(tmp_path / "vocabulary", kind="safeailab", vocab_size=999)
    )
    assert "of kind 'peagle' and must be 'eagle3'" in refusal(
        write_eagle3(tmp_path / "kind", speculators_model_type="peagle")
    )
    assert "num_hidden_layers=2 with latents must be 1" in refusal(
        write_eagle3(tmp_path / "latents", Form(draft_layers=2), kind="modelopt", kv_lora_rank=32)
    )
    assert "layer_types=['sliding_attention'] is computed for Qwen 3's layers alone" in refusal(
        write_eagle3(tmp_path / "window", kind="modelopt", layer_types=["sliding_attention"])
    )


def test_vocabulary_that_leads_beyond_the_targets_is_refused(tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path, Form(tokens=300), kind="safeailab")
    file = folder / "pytorch_model.bin"
    tensors = torch.load(file, weights_only=True)
    for wrong, reason in (
        ({"d2t": tensors["d2t"] + 2000}, "d2t names token"),
        ({"d2t": -torch.arange(300)}, "d2t names a token twice"),
        ({"d2t": tensors["d2t"][:200]}, r"d2t is [200] and must be [300]"),
        ({"t2d": tensors["t2d"][:100]}, r"t2d is [100] and must be [2048]"),
    ):
        torch.save({**tensors, **wrong}, file)
        assert reason in refusal(folder)
    torch.save({name: tensor for name, tensor in tensors.items() if name != "d2t"}, file)
    assert "300 tokens of the target's 2048, and no d2t" in refusal(folder)
