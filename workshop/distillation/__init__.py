"""Fits a draft to its target's answers to given prompts: ``outrider distil``."""
