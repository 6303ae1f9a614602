"""Qwen 3 (Yang et al. 2025): Qwen 2 without biases, with a norm per query and key head."""

from outrider.engine.models.architecture import Architecture

QWEN3 = Architecture("Qwen3ForCausalLM", window="sliding_window", query_key_norm=("q_norm", "k_norm"))
