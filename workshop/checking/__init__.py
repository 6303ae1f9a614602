"""Proves that two deployments say the same, or tells how they differ: ``outrider check``."""
