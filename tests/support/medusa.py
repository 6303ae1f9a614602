"""Random Medusa heads for the demo target, and states that they read, to compare with the authors' code."""

import torch
from torch import Tensor

SIZE, VOCABULARY = 256, 2048
HEADS, LAYERS, ROWS = 3, 2, 4


def golden_tensors() -> dict[str, Tensor]:
    """Returns weights with the names of Medusa's authors: residual layers and a projection for each head."""
    generator = torch.Generator().manual_seed(6)
    tensors = {}
    for head in range(HEADS):
        for layer in range(LAYERS):
            weight = torch.randn(SIZE, SIZE, generator=generator)
            tensors[f"{head}.{layer}.linear.weight"] = weight * SIZE**-0.5
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(SIZE, generator=generator)
        projection = torch.randn(VOCABULARY, SIZE, generator=generator)
        tensors[f"{head}.{LAYERS}.weight"] = projection * SIZE**-0.5
    return tensors


def golden_states() -> Tensor:
    """Returns random states, [ROWS, SIZE]."""
    return torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(7))
