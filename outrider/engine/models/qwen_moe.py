"""Mixtures of experts of Qwen 2 (Yang et al. 2024), with a shared expert, and 3 (Yang et al. 2025)."""

from dataclasses import replace

from outrider.engine.models.architecture import Architecture, Mixture
from outrider.engine.models.qwen3 import QWEN3

_MIXTURE = Mixture(normalized="norm_topk_prob")

QWEN2_MOE = Architecture(
    "Qwen2MoeForCausalLM",
    mixture=replace(_MIXTURE, shared="shared_expert", shared_gate="shared_expert_gate"),
)
QWEN3_MOE = replace(QWEN3, model="Qwen3MoeForCausalLM", mixture=_MIXTURE)
