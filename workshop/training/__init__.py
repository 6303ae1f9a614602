"""Trains drafters on the text that a target writes: ``python -m workshop.training``."""
