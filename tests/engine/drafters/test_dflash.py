"""DFlash drafts: their Drafts against plain arithmetic and transformers, forms, traps, the cache."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

import outrider.engine.forward.graphs
from outrider.decoding.settings import Sampling
from outrider.engine.drafters.dflash import DFlash
from outrider.engine.drafters.dflash_head import BlockShape, empty
from outrider.engine.drafters.markov_head import GATED, RECURRENT
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.loading.head_checkpoint import HeadCheckpoint
from outrider.engine.loop.engine import Engine
from outrider.engine.parallel.drafter_step import DrafterStep
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import write_checkpoint
from tests.support.demo_pair import prompt_of
from tests.support.dflash import BLOCK, LAYERS, MASK, SIZE, SIZES, Form, reference, write_dflash
from tests.support.eagle3 import hidden_of, target_model
from tests.support.gpu import gpu
from tests.support.heads import refusal_of
from tests.support.simulated_cuda.install import needs_compiler
from tests.support.target_drafters import (
    KINDS,
    TOKENS,
    Drafted,
    drafted_texts,
    drafter_of,
    drafters_with,
    engine_with,
    plain_texts,
    rounds,
)

refusal = partial(refusal_of, "dflash")

FORMS = {
    "in place": (Form(), "z-lab"),
    "causal": (Form(looks_ahead=False), "z-lab"),
    "shifted": (Form(is_shifted=True), "DeepSpec"),
    "reduced vocabulary": (Form(tokens=300), "speculators"),
    "window": (Form(window=12), "speculators"),
    "DSpark": (Form(is_shifted=True, markov=16), "DeepSpec"),
    "DSpark, gated": (Form(is_shifted=True, markov=16, head=GATED), "DeepSpec"),
    "DFlash2": (Form(is_second=True), "z-lab"),
    "DSpark, recurrent": (Form(is_shifted=True, markov=16, head=RECURRENT), "DeepSpec"),
}
QUICK = ("reduced vocabulary", "DFlash2", "DSpark, recurrent")
SLOW = [pytest.mark.slow]
DEPTH = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return engine_with("dflash", write_dflash(tmp_path_factory.mktemp("drafts") / "dflash"))


def check_drafts(found: list[Drafted], form: Form, temperature: float) -> None:
    """Each Draft of each text is what plain arithmetic drafts after the tokens that were committed then."""
    draft_model, sampling = reference(form), Sampling(temperature=temperature)
    for kind, text in zip(KINDS, found, strict=True):
        prompt = prompt_of(kind)
        tokens = [*prompt, *text.tokens]
        hidden = hidden_of(tokens, form.inputs)
        for length, draft in zip(text.lengths, text.drafts, strict=True):
            before = hidden[: length - 1], tokens[:length]
            assert list(draft.tokens) == draft_model.chain(*before, len(draft), sampling, len(prompt))


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW * (name not in QUICK)) for name in FORMS])
@torch.inference_mode()
def test_drafts_are_those_of_plain_arithmetic_after_partly_refused_blocks_too(
    tmp_path: Path, name: str
) -> None:
    form, kind = FORMS[name]
    found = drafted_texts(engine_with("dflash", write_dflash(tmp_path, form, kind)), 0.7, DEPTH, company=6)
    assert [text.tokens for text in found] == plain_texts(0.7)
    check_drafts(found, form, 0.7)
    for of_kind, text in zip(KINDS, found, strict=True):  # none ended before its depth, or the text's end
        end = len(prompt_of(of_kind)) + TOKENS
        assert [len(draft) for draft in text.drafts] == [min(DEPTH, end - at - 1) for at in text.lengths]
    assert any(0 < text.accepted < DEPTH * text.rounds for text in found)


@pytest.mark.parametrize(("name", "rows"), [("in place", BLOCK), ("causal", DEPTH + 1)])
def test_rows_that_no_other_row_sees_are_fed_for_wanted_tokens_alone(
    tmp_path: Path, name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, kind = FORMS[name]
    fed, read = set[int](), DFlash._read_blocks

    def reading(self: DFlash, blocks: list[Feed]) -> Any:
        fed.update(len(block.tokens) for block in blocks)
        return read(self, blocks)

    monkeypatch.setattr(DFlash, "_read_blocks", reading)
    drafted_texts(engine_with("dflash", write_dflash(tmp_path, form, kind)), 0.7, DEPTH, company=6)
    assert max(fed) == rows
    assert (min(fed) == rows) == form.looks_ahead  # at the text's end fewer tokens are wanted


@pytest.mark.parametrize(("temperature", "company"), [(0.0, 6), (1.0, 1)])
def test_text_is_the_same_with_drafts_and_without(target: Engine, temperature: float, company: int) -> None:
    found = drafted_texts(target, temperature, depth=8, company=company)
    assert [text.tokens for text in found] == plain_texts(temperature)
    assert sum(text.accepted for text in found) > 0
    assert max(text.deepest for text in found) == BLOCK - 1  # no deeper than its block


def test_draft_with_alternatives_is_a_tree_of_what_the_rows_say(target: Engine) -> None:
    chains, trees = (drafted_texts(target, 0.7, DEPTH, 6, alternatives) for alternatives in (0, 6))
    assert [text.tokens for text in trees] == plain_texts(0.7)
    assert sum(text.accepted for text in trees) > sum(text.accepted for text in chains)
    assert any(len(draft) > draft.chain_length for text in trees for draft in text.drafts)


@torch.inference_mode()
@pytest.mark.parametrize("window", [2048, 5])
def test_logits_are_those_of_transformers_in_blocks_after_refused_blocks_too(
    tmp_path: Path, window: int
) -> None:
    """Muse Glimmer's assistant is a DFlash draft whose layers have a window in both directions."""
    outputs = [1, 3, 4]
    sizes = {name: value for name, value in SIZES.items() if name != "rope_theta"}
    config = MuseGlimmerAssistantConfig(
        **sizes,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        sliding_window=window,
        block_size=BLOCK,
        mask_token_id=MASK,
        target_layer_ids=outputs,
        attn_implementation="eager",
    )
    torch.manual_seed(7)
    published = MuseGlimmerAssistantModel(config).float().eval()
    published.save_pretrained(tmp_path)
    engine = engine_with("dflash", tmp_path, self_check=False)
    drafter = drafter_of(engine)
    assert isinstance(drafter, DFlash)
    hidden = torch.randn(20, len(outputs), SIZE)
    model = target_model()
    sequence = engine.open(20, 0, Sampling())
    assert engine._cache.reserve(sequence, 20 + BLOCK)
    tables, seen = drafter._target.tables, 0
    cache = DFlashCache(config=config)
    cache.activate_past_recording()
    for length, newest in ((9, 3), (12, 4), (20, 5)):  # each block overwrites what the block before has left
        states = drafter._reduced(hidden[seen:length])
        context = Feed([0] * (length - seen), 0, seen, sequence.blocks, None)
        drafter._compute(DrafterStep(StepInput.of(tables, [context]), wants_logits=False), states)
        tokens = [newest] + [MASK] * (BLOCK - 1)
        block = Feed(tokens, BLOCK - 1, length, sequence.blocks, None, looks_ahead=True)
        _, logits = drafter._compute(DrafterStep(StepInput.of(tables, [block])), states[:0])
        cache.set_previous_accepted_tokens(length - seen)
        if seen:
            cache.crop(-BLOCK)
        after = published(
            noise_embeds=model.get_input_embeddings()(torch.tensor([tokens])),
            context_hidden_states=hidden[seen:length].flatten(1)[None],
            position_ids=torch.arange(seen, length + BLOCK)[None],
            cache=cache,
        ).last_hidden_state
        seen = length
        expected = model.get_output_embeddings()(after[0, 1:])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def write_random(folder: Path, model: Path) -> Path:
    """Writes a random draft of a small target: its guesses depend on all that it is fed."""
    folder.mkdir()
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    own = {"mask_token_id": MASK, "target_layer_ids": [0, 1]}
    config = {"architectures": ["DFlashDraftModel"], **sizes, "block_size": BLOCK, "dflash_config": own}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"unused": torch.zeros(1)}, folder / "model.safetensors")
    named = EngineSettings.model_validate({"model": str(model), **drafters_with("dflash", folder)})
    checkpoint = HeadCheckpoint(named, "dflash")
    tensors = empty(checkpoint, BlockShape.of(checkpoint)).state_dict()
    generator = torch.Generator().manual_seed(0)
    random = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    save_file(random, folder / "model.safetensors")
    return folder


@pytest.mark.slow  # Triton's interpreter takes its time
@needs_compiler
def test_drafts_on_a_gpu_are_those_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outrider.engine.forward.graphs, "CAPTURED_SIZES", (1, 4, 16))
    model = write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=2)
    named = {"model": str(model), **drafters_with("dflash", write_random(tmp_path / "draft", model))}
    given = {**named, "cache_memory": 2**21, "block_size": 8, "self_check": False, "dtype": "float32"}

    def drafted(device: str) -> list[Drafted]:
        engine = Engine.from_settings(EngineSettings.model_validate({**given, "device": device}))
        return rounds(engine, [(5, 9, 33, 5, 9, 33, 5, 9), (77, 12, 4)], 0.7, DEPTH, 2, max_tokens=10)

    expected = drafted("cpu")
    with gpu():
        found = drafted("cuda")
    assert found == expected
    assert all(text.of_host for text in found)
    assert all(any(text.drafts) for text in found)


def test_other_forms_hold_the_same_draft(tmp_path: Path, target: Engine) -> None:
    """speculators counts layers as inputs, and z-lab as outputs."""
    other = engine_with("dflash", write_dflash(tmp_path, kind="speculators"))
    expected, found = (drafted_texts(model, 0.7, DEPTH, company=6) for model in (target, other))
    assert found == expected


@pytest.mark.parametrize(
    "other",
    [
        {"kind": "speculators", "speculators_model_type": "dspark", "markov_rank": 16},
        {
            "architectures": ["DSparkDraftModel"],
            "dflash_config": {
                "mask_token_id": MASK,
                "target_layer_ids": [1, 3, 4],
                "projector_type": "dspark",
                "markov_rank": 16,
            },
        },
    ],
    ids=["speculators", "SpecForge"],
)
def test_other_forms_of_dspark_hold_the_same_draft(tmp_path: Path, other: dict[str, Any]) -> None:
    form = FORMS["DSpark"][0]
    expected, found = (
        rounds(
            engine_with("dflash", write_dflash(tmp_path / name, form, **told)),
            [prompt_of("json")],
            0.7,
            DEPTH,
        )
        for name, told in (("DeepSpec", {"kind": "DeepSpec"}), ("other", other))
    )
    assert found == expected
    assert any(found[0].drafts)


def test_config_that_names_no_layers_reads_them_at_even_distances(tmp_path: Path) -> None:
    form = Form(outputs=(1, 3))  # layers of six, from 1 up to the third but last
    named = write_dflash(tmp_path / "named", form)
    unnamed = write_dflash(tmp_path / "unnamed", form, dflash_config={"mask_token_id": MASK})
    expected, found = (
        rounds(engine_with("dflash", folder), [prompt_of("json")], 0.7, DEPTH) for folder in (named, unnamed)
    )
    assert found == expected


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(
    "wrong",
    [
        {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2, 3]}},
        {"dflash_config": {"mask_token_id": MASK + 1, "target_layer_ids": [1, 3, 4]}},
        {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3, 4], "causal": True}},
        {"sample_from_anchor": True},
    ],
    ids=["layers", "mask", "causal", "shifted"],
)
def test_config_that_is_a_little_wrong_drafts_otherwise(
    tmp_path: Path, target: Engine, wrong: dict[str, Any]
) -> None:
    """None of it raises anything: the comparison above must see it."""
    other = engine_with("dflash", write_dflash(tmp_path, **wrong))
    right, found = (drafted_texts(model, 0.0, DEPTH, company=6) for model in (target, other))
    assert [text.tokens for text in found] == [text.tokens for text in right]
    assert [text.drafts for text in found] != [text.drafts for text in right]


@torch.inference_mode()
def test_chunked_prompts_shared_prefixes_and_lost_caches_change_no_draft(tmp_path: Path) -> None:
    folder = write_dflash(tmp_path)
    chunked = engine_with("dflash", folder, prefill_chunk=24, block_size=4)
    drafted_texts(chunked, 0.7, DEPTH, company=6)
    check_drafts(drafted_texts(chunked, 0.7, DEPTH, company=6), Form(), 0.7)  # most of each prompt was there
    block = 4 * (6 * 2 * 4 * 32 + LAYERS * 2 * 2 * 64) * 4
    tight = engine_with("dflash", folder, block_size=4, cache_memory=64 * block)
    preempted = drafted_texts(tight, 0.7, DEPTH, company=6)
    assert [text.tokens for text in preempted] == plain_texts(0.7)
    assert sum(text.preemptions for text in preempted) > 0
    check_drafts(preempted, Form(), 0.7)


def test_plain_decoding_between_rounds_leaves_no_gap_in_the_cache(target: Engine) -> None:
    always = rounds(target, [prompt_of("json")], 0.7, DEPTH)[0]
    sometimes = rounds(target, [prompt_of("json")], 0.7, DEPTH, plain=(10, 20))[0]
    assert sometimes.tokens == always.tokens
    drafted = dict(zip(always.lengths, always.drafts, strict=True))
    pairs = zip(sometimes.lengths, sometimes.drafts, strict=True)
    both = [(draft, drafted[length]) for length, draft in pairs if length in drafted]
    assert len(both) > 5
    assert all(draft == other for draft, other in both)


@pytest.mark.parametrize("rule", [pytest.param("rejection", marks=SLOW), "block"])
def test_under_rejection_or_block_drafts_say_what_they_were_drawn_from(tmp_path: Path, rule: str) -> None:
    target = engine_with("dflash", write_dflash(tmp_path, *FORMS["shifted"]))
    found = drafted_texts(target, 1.0, DEPTH, company=6, verification=rule)
    assert sum(text.accepted for text in found) > 0
    assert all(len(draft.draft_probs) == len(draft) for text in found for draft in text.drafts)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"speculators_model_type": "peagle"}, "of kind 'peagle' and must be one of dflash, dflash2, dspark"),
        ({"dflash_config": {"projector_type": "domino"}}, "of kind 'domino'"),
        (
            {"markov_rank": 16, "markov_head_type": "gru"},
            "markov_head_type='gru' must be one of vanilla, gated, rnn",
        ),
        ({"markov_rank": 16}, "it has no markov_head.markov_w1.weight"),
        ({"selector_rank": 256}, "selector_top_k=None must be a number of at least 1"),
        ({"selector_rank": 256, "selector_top_k": 16}, "it has no candidate_selector.predecessor_codebook"),
        ({"conv_kernel_size": 2, "conv_group_size": 3}, "conv_group_size=3 must divide hidden_size=256"),
        ({"output_multiplier": 0.5}, "output_multiplier=0.5 is not computed"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not computed"),
        ({"block_size": 1}, "block_size=1 must be a number of at least 2"),
        ({"dflash_config": {}}, "mask_token_id=None must be a number"),
        (
            {"dflash_config": {"mask_token_id": 5000, "target_layer_ids": [1, 3, 4]}},
            "mask_token_id=5000 must be below 2048",
        ),
        (
            {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 60]}},
            "reads layer 61 of a target",
        ),
        ({"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3]}}, "must be [256, 512]"),
        ({"vocab_size": 999}, "vocab_size=999 must be 2048"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "its sliding layers see a block backwards",
        ),
        ({"num_hidden_layers": 1}, "layers.1.input_layernorm.weight"),
        ({"num_hidden_layers": 3}, "it has no layers.2"),
    ],
    ids=str,
)
def test_draft_that_is_not_for_this_target_is_refused_by_what_differs(
    tmp_path: Path, wrong: dict[str, Any], reason: str
) -> None:
    assert reason in refusal(write_dflash(tmp_path, **wrong))


def test_tensor_of_another_kind_of_draft_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_dflash(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "markov_head.markov_w1.weight": torch.zeros(2)}, folder / "model.safetensors")
    assert "markov_head.markov_w1.weight is no part of a DFlash draft" in refusal(folder)


def test_confidence_of_dspark_reads_a_row_and_the_token_before_it(tmp_path: Path) -> None:
    form = Form(is_shifted=True, markov=16)
    drafter, tensors = (
        drafter_of(engine_with("dflash", write_dflash(tmp_path, form, "DeepSpec"))),
        reference(form).tensors,
    )
    states, tokens = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(1)), [4, 5, 300]
    read = torch.cat([states, tensors["markov_head.markov_w1.weight"][tokens]], dim=1)
    expected = read @ tensors["confidence_head.proj.weight"][0]
    torch.testing.assert_close(drafter._confidences(states, tokens), expected, atol=1e-4, rtol=1e-4)


def test_drafts_of_a_confident_head_are_deeper_and_say_the_same(tmp_path: Path) -> None:
    form, lengths = Form(is_shifted=True, markov=16), list[int]()
    for bias in (-4.0, 4.0):
        folder = write_dflash(tmp_path / str(bias), form, "DeepSpec")
        tensors = {
            **load_file(folder / "model.safetensors"),
            "confidence_head.proj.bias": torch.tensor([bias]),
        }
        tensors["confidence_head.proj.weight"] = torch.zeros(
            1, SIZE
        )  # the row alone, as the form without tokens
        save_file(tensors, folder / "model.safetensors")
        found = drafted_texts(engine_with("dflash", folder), 0.7, DEPTH, 6, least_survival=0.2)
        assert [text.tokens for text in found] == plain_texts(0.7)
        lengths.append(sum(draft.chain_length for draft in found[0].drafts[:4]))
    assert lengths[0] < lengths[1]


def test_confidence_head_of_another_size_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_dflash(tmp_path / "draft", Form(is_shifted=True, markov=16), "DeepSpec")
    tensors = {**load_file(folder / "model.safetensors"), "confidence_head.proj.weight": torch.zeros(1, 3)}
    save_file(tensors, folder / "model.safetensors")
    assert f"confidence_head.proj.weight is [1, 3] and must be [1, {SIZE}]" in refusal(folder)
