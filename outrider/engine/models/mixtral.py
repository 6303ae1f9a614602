"""Mixtral (Jiang et al. 2024): Mistral with a mixture of experts in each layer."""

from outrider.engine.models.architecture import Architecture, Mixture

FILES = (
    "block_sparse_moe.experts.{}.w1",
    "block_sparse_moe.experts.{}.w3",
    "block_sparse_moe.experts.{}.w2",
)
MIXTRAL = Architecture("MixtralForCausalLM", window="config.sliding_window", mixture=Mixture(files=FILES))
