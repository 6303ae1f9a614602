"""MiniMax M2 (MiniMax 2025): a norm over all query heads, a norm over all key heads, and a mixture."""

from outrider.engine.models.architecture import Architecture, Mixture
from outrider.engine.models.mixtral import FILES

MINIMAX_M2 = Architecture(
    "MiniMaxM2ForCausalLM",
    query_key_norm=("q_norm", "k_norm"),
    mixture=Mixture(scores="sigmoid", correction="e_score_correction_bias", files=FILES),
)
