"""Drafts that are made before their Verdict is known."""
