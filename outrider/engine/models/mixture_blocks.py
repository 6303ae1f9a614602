"""Mixtures of experts of models that are not in the registry, by the class of transformers' block.

The fast decoder supports neither recurrent layers (Qwen3-Next, Qwen 3.5) nor latent attention (DeepSeek-V3,
GLM-4.7-Flash). Their experts still keep their stored form, and a step reads only the experts that its tokens
chose.
"""

from outrider.engine.models.architecture import Mixture

_QWEN = Mixture(shared="shared_expert", shared_gate="shared_expert_gate")
_DEEPSEEK = Mixture(scores="sigmoid", shared="shared_experts")
MIXTURE_BLOCKS = {
    "Qwen3NextSparseMoeBlock": Mixture(
        normalized="norm_topk_prob", shared=_QWEN.shared, shared_gate=_QWEN.shared_gate
    ),
    "Qwen3_5MoeSparseMoeBlock": _QWEN,
    # These models keep transformers' router.
    "DeepseekV3MoE": _DEEPSEEK,
    "Glm4MoeLiteMoE": _DEEPSEEK,
}

# Experts of Nemotron-H have no gate, so neither stored weights nor kernels for a GPU support them.
NEMOTRON_BLOCK = "NemotronHMoE"
NEMOTRON_MIXTURE = Mixture(
    scores="sigmoid",
    correction="gate.e_score_correction_bias",
    groups=("num_group", "topk_group"),
    normalized="norm_topk_prob",
    scaling="routed_scaling_factor",
)
