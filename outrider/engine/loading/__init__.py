"""Loading of checkpoints: weights, quantization, shares of ranks, and the check of a loaded model."""
