"""Copies of small numbers to the device that computes."""

import torch
from torch import Tensor


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """From the host, without waiting for what the device was given before."""
    if device.type == "cuda":  # from memory that is not pinned a copy would wait
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)
