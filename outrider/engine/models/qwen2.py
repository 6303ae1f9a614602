"""Qwen 2 and 2.5 (Yang et al. 2024): Llama with biases, and in some layers a sliding window."""

from outrider.engine.models.architecture import Architecture

QWEN2 = Architecture("Qwen2ForCausalLM", window="sliding_window")
