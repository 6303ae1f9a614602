"""Mistral (Jiang et al. 2023): Llama with a sliding window whose length is in the config alone."""

from outrider.engine.models.architecture import Architecture

MISTRAL = Architecture("MistralForCausalLM", window="config.sliding_window")
