"""Mistral (Jiang et al. 2023): Llama with a sliding window, which the config alone tells."""

from outrider.engine.models.architecture import Architecture

MISTRAL = Architecture("MistralForCausalLM", window="config.sliding_window")
