"""Kernels: Triton for CUDA, imported only if logits are on such a device; under cpu compiled functions."""
