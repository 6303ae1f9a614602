"""What each rank is planned to hold is what a model of tensors without content holds, sharded by its plan."""

from pathlib import Path

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loading import shares
from outrider.engine.loading.weights import attach
from outrider.engine.parallel.plan import use_own_plan
from outrider.engine.planning.skeleton import ModelSkeleton
from outrider.engine.settings import EngineSettings
from tests.support.sharded import bytes_of, group_of, sharded
from tests.support.small_models import small

WITH_A_PLAN = [
    kind
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if kind in CONFIG_MAPPING and getattr(CONFIG_MAPPING[kind], "base_model_tp_plan", None)
]
# Heads that are divided, repeated, gathered, whole, fused, from compressed keys; experts beside them.
QUICK = [
    "llama",
    "phi3",
    "olmo2",
    "minimax_m2",
    "gpt_oss",
    "deepseek_v2",
    "afmoe",
    "gpt_neox",
    "qwen3_moe",
    "qwen3_next",
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow) for kind in WITH_A_PLAN]
)
def test_plan_of_a_rank_is_what_it_holds(
    kind: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "LEAST_SHARED", 0)  # embeddings are most of a model as small as this
    model = small(kind)
    if model is None:
        pytest.skip("no small model of this kind")
    config = model.config
    config.tie_word_embeddings = False
    config.save_pretrained(tmp_path)
    use_own_plan(config)
    try:
        planned = ModelSkeleton(config, kind, torch.bfloat16)
        shares.check_shares(EngineSettings(model=str(tmp_path), tensor_parallel=size))
    except (UnsupportedModelError, RuntimeError) as error:
        pytest.skip(f"refused: {error}")
    with group_of(size):
        found = sharded(config, size)
        probe = attach(found, kind)
        assert planned.layers_of(size) == probe.shapes
        assert planned.states_of(size) == probe.states
    assert planned.weight_bytes(size) == pytest.approx(bytes_of(found), rel=0.002)


def test_number_that_layers_have_of_their_own_is_found_in_each() -> None:
    config = CONFIG_MAPPING["gemma4_text"](num_hidden_layers=6, head_dim=64, global_head_dim=128)
    assert shares.numbers_of(config, "head_dim") == {64, 128}
    assert shares.numbers_of(config, "num_attention_heads") == {config.num_attention_heads}
    assert shares.numbers_of(config, "nothing_of_this_name") == set()
