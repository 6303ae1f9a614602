"""Drafts that are made before the Verdict that they follow is known."""
