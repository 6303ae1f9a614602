"""GLM-4.5 to 4.7 (GLM-4.5 Team 2025): experts chosen as in DeepSeek-V3; the first layers are dense."""

from outrider.engine.models.architecture import Architecture, Mixture

GLM4_MOE = Architecture(
    "Glm4MoeForCausalLM",
    query_key_norm=("q_norm", "k_norm"),
    mixture=Mixture(
        scores="sigmoid",
        correction="gate.e_score_correction_bias",
        groups=("num_group", "topk_group"),
        normalized="norm_topk_prob",
        scaling="routed_scaling_factor",
        shared="shared_experts",
    ),
)
