"""Qwen 2 and 2.5 (Yang et al. 2024): Llama with biases, and a sliding window in some layers."""

from outrider.engine.models.architecture import Architecture

QWEN2 = Architecture("Qwen2ForCausalLM", window="sliding_window")
