"""Every decoder of transformers that can be made small: right ones pass the self-check, others do not."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import outrider.engine.forward.forward_pass
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.forward_pass import ForwardPass
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import COMMON

LARGEST = 6_000_000  # parameters
# Each model takes what it knows of these.
FIELDS: dict[str, Any] = {
    **COMMON,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "sliding_window": 24,
    "query_pre_attn_scalar": 16,
    "eos_token_id": 2,
}
OTHER_NAMES: dict[str, Any] = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "d_model": 64,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 128,
    "ffn_dim": 128,
    "num_layers": 3,
    "num_heads": 4,
    "word_embed_proj_dim": 64,
}
DROPPED = [
    (),
    ("sliding_window",),
    ("query_pre_attn_scalar",),
    ("head_dim",),
    ("head_dim", "num_key_value_heads"),
]
ENCODERS = (
    "bert bert-generation camembert data2vec-text electra ernie roberta roberta-prelayernorm xlm-roberta"
)
ATTEND_OTHERWISE = "diffllama doge nemotron hy_v4 deepseek_v32 glm_moe_dsa axk2 hrm_text dory"
# transformers has the window in its mask alone, or in its attention alone.
WINDOW_UNKNOWN = "phimoe olmoe"
REFUSED = {*ENCODERS.split(), "xlm-roberta-xl", *ATTEND_OTHERWISE.split(), *WINDOW_UNKNOWN.split()}


NOT_ROUTED = ("does not route its attention", "keep no keys and values")


def small(kind: str) -> Any:
    """A random float32 model that transformers itself can run, None if none of this size is found."""
    for extra in ({}, OTHER_NAMES):
        for dropped in DROPPED:
            fields = {name: value for name, value in {**FIELDS, **extra}.items() if name not in dropped}
            try:
                config = AutoConfig.for_model(kind, **fields)
                with torch.device("meta"):
                    size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
                if size > LARGEST:
                    continue
                model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
                with torch.no_grad():
                    model(input_ids=torch.arange(3, 8)[None], use_cache=False)
            except Exception:  # whatever this model has against these fields
                continue
            return model
    return None


def refusal(model: Any, kind: str) -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outrider.engine.forward.forward_pass, "load_model", lambda settings: model)
        try:
            ForwardPass(EngineSettings(model=kind, block_size=8, cache_memory=2**22, device="cpu"))
        except UnsupportedModelError as error:
            return str(error)
    return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_right_models_pass_and_wrong_ones_are_refused(kind: str) -> None:
    model = small(kind)
    if model is None:
        pytest.skip("no small model of this kind")
    for seed in (0, 1):
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim >= 2:
                    weight.normal_(0, 0.15)
        for dtype in (torch.float32, torch.bfloat16):
            message = refusal(copy.deepcopy(model).to(dtype), kind)
            if kind in REFUSED:
                assert message is not None
                assert kind in message
            else:
                assert message is None or any(reason in message for reason in NOT_ROUTED)
