"""Frees the memory of models that are no longer used."""

import gc

import torch


def free_memory() -> None:
    """Frees the memory of deleted models on the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
