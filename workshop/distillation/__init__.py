"""Fits a draft to what its target says to given prompts: ``outrider distil``."""
