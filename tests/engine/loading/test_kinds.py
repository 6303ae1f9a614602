"""Models that cannot be served are refused from their config alone, with a reason that holds."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loading.kinds import check_kind, check_states
from outrider.engine.loading.shares import check_shares
from outrider.engine.loading.weights import load_model
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.settings import EngineSettings

SPARSE, STATE, ALONE = (
    "sparse attention",
    "only those of Gated DeltaNet and of Nemotron-H's Mamba-2",
    "text part alone",
)
REASONS = {
    "deepseek_v32": SPARSE,
    "deepseek_v4": SPARSE,
    "glm_moe_dsa": SPARSE,
    "glm5_next": SPARSE,
    "qwen4_exp": SPARSE,
    "kimi_linear": STATE,
    "bamba": STATE,
    "jamba": STATE,
    "falcon_h1": STATE,
    "zamba2": STATE,
    "mamba": STATE,
    "rwkv": STATE,
    "minimax": STATE,
    "nemotron": "cannot find the cache",
    "diffllama": "several attentions in a layer",
    "kimi_k25": ALONE,
    "llava": ALONE,
    "minimax_m3_vl": ALONE,
    "qwen2_5_vl": ALONE,
    "qwen3_vl": ALONE,
    "qwen3_vl_moe": ALONE,
    "mistral4": "no decoder-only model",
    "t5": "no decoder-only model",
}
SERVED = ["llama", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "glm4_moe", "minimax_m2"]
SERVED += ["qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h"]


@pytest.mark.parametrize(("kind", "reason"), REASONS.items())
def test_kind_that_cannot_be_served_is_refused_with_its_reason(kind: str, reason: str) -> None:
    config = CONFIG_MAPPING[kind]()
    with pytest.raises(UnsupportedModelError, match=f"model='it', a .*{reason}") as refusal:
        check_kind(config, "it")
    assert len(str(refusal.value)) < 250  # no list of classes


@pytest.mark.parametrize("kind", SERVED)
def test_kind_that_is_served_passes(kind: str) -> None:
    check_kind(CONFIG_MAPPING[kind](), "it")


LOOKS = pytest.mark.parametrize("look", [skeleton, load_model, check_shares])


@LOOKS
def test_checkpoint_with_code_of_its_own_is_refused_and_its_code_not_run(
    look: object, tmp_path: Path
) -> None:
    config = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedModelError, match="a kimi_k2, is of a kind that transformers does not know"
    ):
        look(EngineSettings(model=str(tmp_path), tensor_parallel=2))  # type: ignore[operator]


@LOOKS
def test_checkpoint_that_is_refused_gives_the_reason_before_weights_are_read(
    look: object, tmp_path: Path
) -> None:
    CONFIG_MAPPING["qwen3_5"]().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="keeps recurrent states and needs to be a target"):
        look(EngineSettings(model=str(tmp_path), tensor_parallel=2, is_draft=True))  # type: ignore[operator]


@pytest.mark.parametrize("given", [{"adapters": {"brief": "folder"}}, {"adapter_folder": "folder"}], ids=str)
def test_adapters_of_a_model_with_recurrent_states_are_refused(given: dict[str, Any]) -> None:
    settings = EngineSettings(model="it", **given)
    with pytest.raises(UnsupportedModelError, match="needs requests without adapters"):
        check_states(CONFIG_MAPPING["qwen3_5"](), settings)


def test_ranks_of_a_model_with_mamba2_are_refused() -> None:
    settings = EngineSettings(model="it", tensor_parallel=2)
    check_states(CONFIG_MAPPING["qwen3_5"](), settings)
    with pytest.raises(UnsupportedModelError, match=r"tensor_parallel=2: model='it'.*needs a single device"):
        check_states(CONFIG_MAPPING["nemotron_h"](), settings)
