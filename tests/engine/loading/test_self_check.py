"""The self-check compares a model with transformers' own attention, and refuses a model that differs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoConfig

from outrider.decoding.draft import Draft
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.attention import ATTENTION, Paged, attend
from outrider.engine.forward.attention_groups import AttentionGroup, QuerySpan
from outrider.engine.loop.forward_pass import ForwardPass
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import ARCHITECTURES, COMMON, write_checkpoint
from tests.support.functions import needs_functions

EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}

Change = Callable[[int, dict[str, Any]], None]  # what a layer's attention is given


def load(folder: Path, **fields: Any) -> ForwardPass:
    settings = {"model": str(folder), "block_size": 8, "cache_memory": 2**20, "threads": 1, **fields}
    return load_forward_pass(EngineSettings.model_validate(settings))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write_checkpoint(tmp_path_factory.mktemp(kind), kind) for kind in ARCHITECTURES}


@pytest.fixture
def break_attention() -> Iterator[Callable[[Change], None]]:
    def register(change: Change) -> None:
        def broken(module: torch.nn.Module, *tensors: Any, **given: Any) -> Any:
            if isinstance(given["outrider"], Paged):
                change(module.layer_idx, given)  # type: ignore[arg-type]
            return attend(module, *tensors, **given)

        AttentionInterface.register(ATTENTION, broken)

    yield register
    AttentionInterface.register(ATTENTION, attend)


# In float32 they do in test_architectures.py, whose engines check themselves too.
@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_right_model_passes(folders: dict[str, Path], kind: str, dtype: str) -> None:
    load(folders[kind], dtype=dtype)


def no_window(layer: int, given: dict[str, Any]) -> None:
    given["sliding_window"] = None


def wide_window(layer: int, given: dict[str, Any]) -> None:
    given["sliding_window"] += 1


def wrong_scale(layer: int, given: dict[str, Any]) -> None:
    given["scaling"] *= 1.5


def wrong_scale_in_the_second(layer: int, given: dict[str, Any]) -> None:
    given["scaling"] *= 1.5 if layer == 1 else 1.0


def no_softcap(layer: int, given: dict[str, Any]) -> None:
    given["softcap"] = None


def no_sinks(layer: int, given: dict[str, Any]) -> None:
    given["s_aux"] = None


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("mistral", no_window, "layer 0: beyond the sliding window .*; a second chunk .*; a drafted chain"),
        ("mistral", wide_window, "layer 0: beyond the sliding window"),
        ("llama", wrong_scale, "layer 0: packed prompts"),
        ("llama", wrong_scale_in_the_second, "layer 1: packed prompts"),
        ("qwen3_moe", wrong_scale, "layer 0: packed prompts"),
        ("gemma2", no_softcap, "layer 0: .*a second chunk"),
        ("gpt_oss", no_sinks, "layer 0: packed prompts"),
    ],
)
def test_wrong_attention_is_refused_by_name(
    folders: dict[str, Path],
    break_attention: Callable[[Change], None],
    kind: str,
    change: Change,
    named: str,
    dtype: str,
) -> None:
    break_attention(change)
    with pytest.raises(UnsupportedModelError, match=f"model='{folders[kind]}'.*{named}"):
        load(folders[kind], dtype=dtype)


def siblings_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Draft, "ancestor_mask", lambda draft: np.tri(len(draft), dtype=bool).tolist())


def late_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = QuerySpan.positions

    def shifted(span: QuerySpan) -> list[int]:
        is_chunk = span.start > 0 and span.count > 5 and span.tree is None
        return [position + is_chunk for position in positions(span)]

    monkeypatch.setattr(QuerySpan, "positions", shifted)


def no_mask_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = AttentionGroup.mask
    monkeypatch.setattr(
        AttentionGroup, "mask", lambda group, *given: None if group.num_queries == 1 else mask(group, *given)
    )


GATHERED = [{"dtype": "float16"}, {"dtype": "bfloat16"}]


@pytest.mark.parametrize(
    ("mistake", "named", "fields"),
    [
        *((siblings_seen, "a drafted tree", fields) for fields in [*GATHERED, {"dtype": "float32"}]),
        # Single tokens see the chunk.
        *((late_chunk, "a second chunk [^;]*; single tokens", fields) for fields in GATHERED),
        *((no_mask_for_one, "single tokens", fields) for fields in GATHERED),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_wrong_batch_is_refused_by_what_is_wrong_in_it(
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    mistake: Callable[[pytest.MonkeyPatch], None],
    named: str,
    fields: dict[str, Any],
) -> None:
    """The message names that kind of rows alone: the other kinds are correct."""
    mistake(monkeypatch)
    with pytest.raises(UnsupportedModelError, match=rf"layer \d: {named} [^;]*$"):
        load(folders["llama"], **fields)


@needs_functions
def test_batch_invariant_numerics_are_checked_as_they_run(
    folders: dict[str, Path], break_attention: Callable[[Change], None]
) -> None:
    load(folders["mistral"], batch_invariant=True, dtype="bfloat16")
    break_attention(no_window)
    with pytest.raises(UnsupportedModelError, match="layer 0: beyond the sliding window"):
        load(folders["mistral"], batch_invariant=True, dtype="bfloat16")


def test_check_can_be_switched_off(
    folders: dict[str, Path], break_attention: Callable[[Change], None]
) -> None:
    break_attention(wrong_scale)
    load(folders["llama"], self_check=False)


def test_windows_and_attention_are_as_before_afterwards(folders: dict[str, Path]) -> None:
    model = load(folders["mistral"]).model
    windows = {module.sliding_window for module in model.modules() if hasattr(module, "sliding_window")}
    assert windows | {model.config.sliding_window} == {ARCHITECTURES["mistral"]["sliding_window"]}
    assert model.config._attn_implementation == ATTENTION


@pytest.mark.parametrize("kind", ["phimoe", "olmoe"])
def test_window_that_our_attention_is_not_told_of_is_refused(tmp_path: Path, kind: str) -> None:
    """Unless no sequence is as long."""
    folder = write_checkpoint(tmp_path / "short", kind, **EXPERTS, sliding_window=24)
    with pytest.raises(UnsupportedModelError, match=r"layer 0: beyond the sliding window"):
        load(folder)
    load(write_checkpoint(tmp_path / "long", kind, **EXPERTS, sliding_window=512))


@pytest.mark.parametrize("context", [8, 14, 20])
def test_short_context_is_checked_as_far_as_it_goes(
    tmp_path: Path, break_attention: Callable[[Change], None], context: int
) -> None:
    folder = write_checkpoint(tmp_path, "gpt2", max_position_embeddings=context, n_positions=context)
    load(folder)
    break_attention(wrong_scale)
    if context == 8:
        load(folder)  # too short for a tree: said in the log
    else:
        with pytest.raises(UnsupportedModelError, match="a drafted tree"):
            load(folder)


def test_logits_that_overflow_are_refused_as_such(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 6e4
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    load(folder, dtype="bfloat16")
    with pytest.raises(UnsupportedModelError, match=r"not finite in torch\.float16.*another dtype"):
        load(folder, dtype="float16")


MLA = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        ("bert", {}, "BertLMHeadModel needs to look ahead, as encoders do"),
        ("roberta", {}, "RobertaForCausalLM needs to look ahead"),
        ("electra", {}, "ElectraForCausalLM needs to look ahead"),
        ("diffllama", {}, "a diffllama, has several attentions in a layer"),
        ("doge", {}, "DogeForCausalLM needs a mask of its own"),
        ("nemotron", {}, "a nemotron, does not pass the model's extra arguments on to its attention"),
        ("deepseek_v32", MLA, "a deepseek_v32, attends to tokens that an indexer"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "BloomForCausalLM does not route its attention"),
    ],
)
def test_kind_that_the_config_tells_is_refused_before_weights_load(
    tmp_path: Path, kind: str, fields: dict[str, Any], named: str
) -> None:
    """There are none."""
    AutoConfig.for_model(kind, **{**COMMON, **fields}).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=named):
        load(tmp_path)


def test_experts_without_description_with_batch_invariant_numerics_are_refused_before_weights_load(
    tmp_path: Path,
) -> None:
    AutoConfig.for_model("deepseek_v3", **{**COMMON, **ARCHITECTURES["deepseek_v3"]}).save_pretrained(
        tmp_path
    )
    with pytest.raises(UnsupportedModelError, match=r"batch_invariant=True.*expert"):
        load(tmp_path, batch_invariant=True)
