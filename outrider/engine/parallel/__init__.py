"""Tensor parallelism: how ranks share layers and exchange what they computed."""
