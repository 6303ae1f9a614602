"""Frees the memory of models that are no longer used."""

import gc

import torch


def free_memory() -> None:
    """Returns the memory of deleted models to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
