"""Mixtures of experts beside recurrent layers (Qwen3-Next, Qwen 3.5), by the classes of transformers' blocks.

The fast decoder computes no recurrent layers, so these models have no row of their own.
"""

from outrider.engine.models.architecture import Mixture

MIXTURE_BLOCKS = {
    "Qwen3NextSparseMoeBlock": Mixture(
        normalized="norm_topk_prob", shared="shared_expert", shared_gate="shared_expert_gate"
    ),
    "Qwen3_5MoeSparseMoeBlock": Mixture(shared="shared_expert", shared_gate="shared_expert_gate"),
}
