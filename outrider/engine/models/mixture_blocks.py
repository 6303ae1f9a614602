"""Mixtures of experts of models without a row of their own, by the classes of transformers' blocks.

The fast decoder computes neither recurrent layers (Qwen3-Next, Qwen 3.5) nor latent attention (DeepSeek-V3,
GLM-4.7-Flash). Beside them experts stay as they are stored, and a step reads those that its tokens chose.
"""

from outrider.engine.models.architecture import Mixture

_QWEN = Mixture(shared="shared_expert", shared_gate="shared_expert_gate")
_DEEPSEEK = Mixture(scores="sigmoid", shared="shared_experts")
MIXTURE_BLOCKS = {
    "Qwen3NextSparseMoeBlock": Mixture(
        normalized="norm_topk_prob", shared=_QWEN.shared, shared_gate=_QWEN.shared_gate
    ),
    "Qwen3_5MoeSparseMoeBlock": _QWEN,
    # transformers' own router chooses for these.
    "DeepseekV3MoE": _DEEPSEEK,
    "Glm4MoeLiteMoE": _DEEPSEEK,
}
