"""LoRA adapters of a target: their checkpoints, and their products, which are added to those of layers."""
