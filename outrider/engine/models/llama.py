"""Llama (Touvron et al. 2023; 3: Grattafiori et al. 2024): the names that other architectures keep."""

from outrider.engine.models.architecture import Architecture

LLAMA = Architecture("LlamaForCausalLM")
