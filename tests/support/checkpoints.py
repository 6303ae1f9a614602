"""Small random checkpoints of many architectures, and the text that transformers generates from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 256
NEAR_TIE = 1e-4  # two logits closer than this may swap their order by rounding

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
GEMMA = {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}
DELTA_NET = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": 24},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 5.0},
    "gemma3_text": GEMMA,
    "phi3": {},
    "phi": {},
    "gpt_neox": {},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "deepseek_v3": {
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 32,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": False,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    "glm4_moe": {
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
    },
    "minimax_m2": {
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "rotary_dim": 8,
    },
    "afmoe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "num_dense_layers": 1,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "qwen3_next": {
        **DELTA_NET,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [1],
    },
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {
        **DELTA_NET,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "nemotron_h": {
        "head_dim": 16,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 8,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 64,
        "moe_latent_size": 32,
        "routed_scaling_factor": 2.5,
        # transformers limits the time steps of prompts alone: steps so long that the limit changes nothing.
        "time_step_min": 1e-8,
        "time_step_max": 1.0,
        "time_step_floor": 0.05,
    },
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
}

DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
HYBRIDS = (*DELTA_NETS, "nemotron_h")


@dataclass(frozen=True)
class Reference:
    """Greedy tokens, and the margin of each to the second-best token."""

    tokens: list[int]
    margins: list[float]


def write_checkpoint(folder: Path, model_type: str, seed: int = 0, **settings: Any) -> Path:
    """Writes a float32 checkpoint with weights so large that greedy text does not repeat one token."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**COMMON, **ARCHITECTURES.get(model_type, {}), **settings})
    config.eos_token_id = settings.get("eos_token_id")
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.15)
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(folder)
    return folder


def reference(folder: Path, prompts: list[list[int]], count: int) -> list[Reference]:
    """Returns the answer of ``model.generate`` to each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    references = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(answer.logits)[:, 0].topk(2).values
        references.append(
            Reference(answer.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist())
        )
    return references


def differences(references: list[Reference], answers: list[list[int]]) -> list[str]:
    """Returns the answers that differ from their references not at near-ties; all differences are printed."""
    found = []
    for index, (reference, answer) in enumerate(zip(references, answers, strict=True)):
        pairs = enumerate(zip(reference.tokens, answer, strict=True))
        place = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
        if place is None:
            continue
        line = f"answer {index} differs at {place}, margin {reference.margins[place]:.1e}"
        print(line)
        if reference.margins[place] > NEAR_TIE:
            found.append(line)
    return found
