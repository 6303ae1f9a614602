"""Llama (Touvron et al. 2023; 3: Grattafiori et al. 2024): defaults of the other architectures."""

from outrider.engine.models.architecture import Architecture

LLAMA = Architecture("LlamaForCausalLM")
