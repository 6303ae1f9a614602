"""Smallest random model of an architecture that transformers can run."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.checkpoints import COMMON

LARGEST = 6_000_000  # parameters
# Each architecture uses the fields that it knows.
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
    "full_attention_interval": 2,  # layers; the second of three has full attention
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


def small(kind: str) -> Any:
    """Returns a random float32 model that transformers can run; None if no small model is found."""
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
            except Exception:  # the architecture may reject the fields in any way
                continue
            return model
    return None
