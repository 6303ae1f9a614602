"""P-EAGLE heads: their Drafts against plain arithmetic, forms, refusals, the cache."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import outrider.engine.forward.graphs
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import write_checkpoint
from tests.support.eagle3 import (
    MASK,
    Form,
    check_depths,
    check_drafts,
    write_eagle3,
    write_random_eagle3,
)
from tests.support.gpu import gpu
from tests.support.heads import refusal_of
from tests.support.simulated_cuda.install import needs_compiler
from tests.support.target_drafters import (
    Drafted,
    check_no_gap,
    drafted_texts,
    drafters_with,
    engine_with,
    plain_texts,
    rounds,
)

refusal = partial(refusal_of, "peagle")

FORMS = {
    "two layers": Form(draft_layers=2, has_masks=True),
    "version 3.1, reduced vocabulary": Form(tokens=300, fc_norm=True, norm_output=True, has_masks=True),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return engine_with(
        "peagle", write_eagle3(tmp_path_factory.mktemp("heads") / "peagle", FORMS["two layers"])
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@torch.inference_mode()
def test_drafts_are_those_of_plain_arithmetic_after_partly_refused_chains_too(
    tmp_path: Path, name: str
) -> None:
    found = drafted_texts(engine_with("peagle", write_eagle3(tmp_path, FORMS[name])), 0.7, depth=4, company=6)
    assert [text.tokens for text in found] == plain_texts(0.7)
    check_drafts(found, FORMS[name], 0.7)
    check_depths(found, 4)
    assert any(0 < text.accepted < 4 * text.rounds for text in found)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(("temperature", "company", "depth"), [(0.0, 6, 1), (1.0, 1, 7)])
def test_text_is_the_same_with_drafts_and_without(
    target: Engine, temperature: float, company: int, depth: int
) -> None:
    found = drafted_texts(target, temperature, depth=depth, company=company)
    assert [text.tokens for text in found] == plain_texts(temperature)
    assert sum(text.accepted for text in found) > 0
    assert max(text.deepest for text in found) == depth


def test_draft_with_alternatives_is_a_tree_of_what_the_rows_say(target: Engine) -> None:
    chains, trees = (drafted_texts(target, 0.7, 4, 6, alternatives) for alternatives in (0, 6))
    assert [text.tokens for text in trees] == plain_texts(0.7)
    assert sum(text.accepted for text in trees) > sum(text.accepted for text in chains)
    assert any(len(draft) > draft.chain_length for text in trees for draft in text.drafts)


def test_form_that_names_another_mask_token_holds_the_same_head(tmp_path: Path, target: Engine) -> None:
    """AWS publishes heads in the form of EAGLE-3's authors, with a ptd_token_id."""
    other = engine_with("peagle", write_eagle3(tmp_path, FORMS["two layers"], kind="safeailab"))
    expected, found = (drafted_texts(model, 0.7, depth=4, company=6) for model in (target, other))
    assert found == expected


@pytest.mark.slow
@torch.inference_mode()
def test_chunked_prompts_shared_prefixes_and_lost_caches_change_no_draft(tmp_path: Path) -> None:
    form = FORMS["two layers"]
    folder = write_eagle3(tmp_path, form)
    target = engine_with("peagle", folder, prefill_chunk=24, block_size=4)
    drafted_texts(target, 0.7, depth=4, company=6)
    check_drafts(drafted_texts(target, 0.7, depth=4, company=6), form, 0.7)  # most of each prompt was there
    block = 4 * (6 * 2 * 4 * 32 + 2 * 2 * 2 * 64) * 4
    tight = engine_with("peagle", folder, block_size=4, cache_memory=60 * block)
    preempted = drafted_texts(tight, 0.7, depth=4, company=6)
    assert [text.tokens for text in preempted] == plain_texts(0.7)
    assert sum(text.preemptions for text in preempted) > 0
    check_drafts(preempted, form, 0.7)  # some end early, for want of blocks


def test_plain_decoding_between_rounds_leaves_no_gap_in_the_heads_cache(target: Engine) -> None:
    check_no_gap(target)


@pytest.mark.parametrize("rule", ["rejection", pytest.param("block", marks=pytest.mark.slow)])
def test_under_rejection_or_block_drafts_say_what_they_were_drawn_from(target: Engine, rule: str) -> None:
    found = drafted_texts(target, 1.0, depth=4, company=6, verification=rule)
    assert sum(text.accepted for text in found) > 0
    assert all(len(draft.draft_probs) == len(draft) for text in found for draft in text.drafts)


@pytest.mark.slow  # Triton's interpreter takes its time
@needs_compiler
def test_drafts_on_a_gpu_are_those_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outrider.engine.forward.graphs, "CAPTURED_SIZES", (1, 4, 16))
    model = write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=2)
    head = write_random_eagle3(tmp_path / "head", model, "peagle", layers=2, ptd_token_id=MASK)
    named = {"model": str(model), **drafters_with("peagle", head)}
    given = {**named, "cache_memory": 2**21, "block_size": 8, "self_check": False, "dtype": "float32"}

    def drafted(device: str) -> list[Drafted]:
        engine = Engine.from_settings(EngineSettings.model_validate({**given, "device": device}))
        prompts = [(5, 9, 33, 5, 9, 33, 5, 9), (77, 12, 4)]
        return rounds(engine, prompts, 0.7, depth=4, alternatives=2, max_tokens=10)

    expected = drafted("cpu")
    with gpu():
        found = drafted("cuda")
    assert [(text.tokens, text.drafts) for text in found] == [(text.tokens, text.drafts) for text in expected]
    assert any(not draft.is_chain for text in found for draft in text.drafts)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"speculators_model_type": "eagle3"}, "of kind 'eagle3' and must be 'peagle'"),
        ({"mask_token_id": None}, "mask_token_id=None must be below 2048, the embedding's tokens"),
        ({"mask_token_id": 2048}, "mask_token_id=2048 must be below 2048, the embedding's tokens"),
    ],
)
def test_head_of_another_kind_or_mask_is_refused(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    assert reason in refusal(write_eagle3(tmp_path / "head", FORMS["two layers"], **config))


def test_head_without_the_states_of_a_mask_is_refused(tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "head", FORMS["two layers"])
    tensors = load_file(folder / "model.safetensors")
    del tensors["mask_hidden"]
    save_file(tensors, folder / "model.safetensors")
    assert "mask_hidden" in refusal(folder)


def test_mask_token_may_lie_beyond_the_targets_tokens_in_an_embedding_of_its_own(tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "head", FORMS["two layers"], mask_token_id=2049)
    tensors = load_file(folder / "model.safetensors")
    embedding = torch.randn(2050, 256, generator=torch.Generator().manual_seed(0))
    save_file({**tensors, "embed_tokens.weight": embedding}, folder / "model.safetensors")
    found = drafted_texts(engine_with("peagle", folder), 0.7, depth=4, company=6)
    assert [text.tokens for text in found] == plain_texts(0.7)
    check_depths(found, 4)
