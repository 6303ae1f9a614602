"""LoRA adapters of a target: their checkpoints, and their products beside those of its layers."""
