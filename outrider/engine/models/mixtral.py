"""Mixtral (Jiang et al. 2024): Mistral with a mixture of experts in each layer."""

from outrider.engine.models.architecture import Architecture, Mixture

MIXTRAL = Architecture("MixtralForCausalLM", window="config.sliding_window", mixture=Mixture())
